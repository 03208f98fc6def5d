"""The checks of a request or of the installed libraries, and the process that runs them."""

import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from assay.errors import UsageError
from assay.files import read_json_object
from assay.models.config_files import load_config, load_tokenizer
from assay.models.inspect.inspection import check_tokenizer
from assay.models.sources import RemoteCode, resolve_model, weightless_folder
from assay.models.transformers_calls import quiet_transformers
from assay.plugins import load_object
from assay.runs import Progress
from assay.watchdog import temporary_folder
from assay_smoke.data.accumulation import STEPS, check_accumulation
from assay_smoke.data.chats import check_chat, check_labels
from assay_smoke.data.collating import check_packing, check_padding
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    LoaderPlan,
    Message,
    Render,
    RenderedChat,
    ResumePoint,
    Tokenizer,
)
from assay_smoke.data.sampling import (
    BATCH_SAMPLER_PLANS,
    ComputedItems,
    check_dataset,
    check_loader,
    check_sampling,
)
from assay_smoke.data.tokens import micro_tokenizer, template_messages
from assay_smoke.data.verdict import (
    LEVELS,
    NOT_ASKED_FOR,
    CheckReport,
    DataAnswer,
    DataLevel,
    DataRequest,
    Fault,
    PlannedCheck,
    RaisedError,
    Subject,
    SubjectReport,
)

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

_OPTIONAL = {
    "accelerate": "its data loader and transformers' Trainer, which needs it, are",
    "trl": "its collator is",
}


def is_installed(library: str) -> bool:
    """Return whether `library` is installed."""
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True


def library_checks() -> Iterator[PlannedCheck]:
    """Yield the checks of all installed libraries."""
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
    )

    def of(library: str, level: DataLevel, part: str, check: Any, *arguments: Any) -> PlannedCheck:  # noqa: ANN401
        subject = Subject(f"{library} {version(library)} {part}")
        return PlannedCheck(level, subject.name, partial(check, subject, *arguments), is_own=False)

    hf = partial(of, "transformers")
    for case, tokenizers in _micro_tokenizers_by_case().items():
        part = f"apply_chat_template{case}"
        yield hf("chat", part, check_chat, render_by_template, tokenizers)
        yield hf("labels", part, check_labels, render_by_template, tokenizers)
    padding, lm = padding_tokenizers(), "DataCollatorForLanguageModeling"
    plain = partial(DataCollatorForLanguageModeling, mlm=False)
    yield hf("collator", "DataCollatorForSeq2Seq", check_padding, DataCollatorForSeq2Seq, padding)
    yield hf("collator", f"{lm}(mlm=False)", check_padding, plain, padding, "plain")
    flattening: Any = DataCollatorWithFlattening
    yield hf("packing", flattening.__name__, check_packing, lambda _: flattening(), padding)
    if is_installed("trl"):
        unpadded = partial(_trl_collator, padding_free=True)
        yield of("trl", "collator", lm, check_padding, _trl_collator, padding)
        yield of("trl", "packing", f"{lm}(padding_free=True)", check_packing, unpadded, padding)
    yield of("torch", "sampler", "DistributedSampler", check_sampling, _distributed_sampler)
    yield hf("accumulation", "num_items_in_batch", check_accumulation, _backward_by_model_loss)
    if is_installed("accelerate"):
        seedable, skip = partial(_accelerate, is_seedable=True), "skip_first_batches"
        yield of("accelerate", "sampler", f"{skip}, use_seedable_sampler", check_sampling, seedable)
        yield of("accelerate", "sampler", f"{skip}, as by default", check_sampling, _accelerate)
        resume = "Trainer, resume_from_checkpoint"
        yield hf("sampler", resume, check_sampling, TrainerRun, TRAINER_PLANS)
        one_rank = [step for step in STEPS if len(step) == 1]
        accumulate = "Trainer(gradient_accumulation_steps)"
        yield hf("accumulation", accumulate, check_accumulation, trainer_step, one_rank)
    yield of("torch", "workers", "DataLoader", check_loader, torch_loader)
    yield hf("workers", "seed_worker, as in its Trainer", check_loader, _transformers_loader)
    for option, seed in (("", None), (", seed=0", 0)):
        masked = partial(_masked, seed=seed)
        yield hf("workers", f"{lm}(mlm=True{option})", check_dataset, masked, torch_loader)


def marks_assistant(tokenizer: Tokenizer) -> bool:
    """Return True if the template marks the assistant's tokens; a mask needs these marks."""
    template: object = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else [template]
    return any(re.search(r"{%[-+]? generation", str(one)) for one in templates)


def render_by_template(
    tokenizer: Tokenizer, messages: Sequence[Message], max_length: int | None
) -> RenderedChat:
    """Render by the template, with labels at transformers' assistant mask."""
    options: dict[str, Any] = {"return_assistant_tokens_mask": marks_assistant(tokenizer)}
    if max_length is not None:
        options |= {"truncation": True, "max_length": max_length}
    chat = template_messages(tokenizer, messages)
    encoded: Any = tokenizer.apply_chat_template(chat, return_dict=True, **options)
    ids = list(encoded["input_ids"])
    mask = encoded.get("assistant_masks", [0] * len(ids))
    labels = [id_ if marked else IGNORED for id_, marked in zip(ids, mask, strict=True)]
    return RenderedChat(input_ids=ids, labels=labels)


def micro_tokenizers() -> list[Tokenizer]:
    """Return tokenizers with and without BOS, padding with their own token and with EOS."""
    return [micro_tokenizer(), micro_tokenizer("eos", "template"), micro_tokenizer("own", "both")]


def padding_tokenizers() -> list[Tokenizer]:
    """Return tokenizers that pad with their own token and with EOS."""
    return [micro_tokenizer("own"), micro_tokenizer("eos")]


def _micro_tokenizers_by_case() -> dict[str, list[Tokenizer]]:
    """Return tokenizers by a description of their special feature, empty for usual ones."""
    cutting_left = micro_tokenizer()
    cutting_left.truncation_side = "left"
    in_two_blocks = micro_tokenizer()
    in_two_blocks.chat_template = str(in_two_blocks.chat_template).replace(
        " + '<|eos|>' }}{% endgeneration %}",
        " }}{% endgeneration %}{% generation %}{{ '<|eos|>' }}{% endgeneration %}",
        1,
    )
    return {
        "": micro_tokenizers(),
        ", truncation_side left": [cutting_left],
        ", text and end in two generation blocks": [in_two_blocks],
    }


def _trl_collator(tokenizer: Tokenizer, **options: Any) -> Collate:  # noqa: ANN401 - of the collator
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    pad = tokenizer.pad_token_id
    collator: Collate = DataCollatorForLanguageModeling(pad_token_id=pad, **options)
    return collator


def torch_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, _rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers torch seeds."""
    return _list_loader(dataset, 2, num_workers=num_workers)


def _transformers_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers transformers seeds."""
    from transformers.trainer_utils import seed_worker

    seed = partial(seed_worker, num_workers=num_workers, rank=rank)
    return _list_loader(dataset, 2, num_workers=num_workers, worker_init_fn=seed)


def _list_loader(samples: Any, batch_size: int, **options: Any) -> DataLoader[Any]:  # noqa: ANN401 - of torch
    """Open a DataLoader whose batches are lists of samples."""
    return DataLoader(samples, batch_size, collate_fn=list, **options)


def _masked(samples: Sequence[Feature], seed: int | None) -> Sequence[object]:
    """Return samples whose tokens a collator masks at random."""
    from transformers import DataCollatorForLanguageModeling

    collator: Any = DataCollatorForLanguageModeling(micro_tokenizer(), seed=seed)
    return ComputedItems(len(samples), lambda item: collator([samples[item]]))


Epochs = Iterator[Iterable[Sequence[int]]]


def _distributed_sampler(plan: LoaderPlan, resumed: ResumePoint | None) -> Epochs:
    """Run torch's DistributedSampler. It cannot resume, so seen batches are drawn and discarded."""
    sampler: Any = DistributedSampler(
        range(plan.num_samples),  # type: ignore[arg-type] # any sequence
        plan.num_ranks,
        plan.rank,
        plan.shuffle,
        plan.seed,
        plan.drop_last,
    )
    loader = _open_loader(plan, sampler=sampler)
    return _epochs(plan, resumed, sampler.set_epoch, lambda seen: islice(iter(loader), seen, None))


def _accelerate(
    plan: LoaderPlan, resumed: ResumePoint | None, *, is_seedable: bool = False
) -> Epochs:
    """Run accelerate's loader. By default it draws the order from torch's global generator.

    is_seedable: use a sampler that is seeded by epoch.
    """
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    seeded = {"use_seedable_sampler": True, "data_seed": plan.seed} if is_seedable else {}
    ranks = {"num_processes": plan.num_ranks, "process_index": plan.rank}
    opened = _open_loader(plan, shuffle=plan.shuffle)
    loader: Any = prepare_data_loader(opened, put_on_device=False, **ranks, **seeded)

    def skip(seen: int) -> Any:  # noqa: ANN401 - of accelerate
        return skip_first_batches(loader, seen) if seen else loader

    return _epochs(plan, resumed, loader.set_epoch, skip)


def _open_loader(plan: LoaderPlan, **order: object) -> Any:  # noqa: ANN401 - of torch
    order |= {"num_workers": plan.num_workers, "drop_last": plan.drop_last}
    return _list_loader(range(plan.num_samples), plan.batch_size, **order)


def _epochs(
    plan: LoaderPlan,
    resumed: ResumePoint | None,
    set_epoch: Callable[[int], None],
    skip: Callable[[int], Iterable[Sequence[int]]],
) -> Epochs:
    """Yield the remaining epochs, the first without its seen batches."""
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        set_epoch(epoch)
        yield skip(seen if epoch == first else 0)


def _backward_by_model_loss(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    num_step_tokens: int,
    num_ranks: int,
) -> None:
    """Accumulate by the loss of transformers' models, given the label tokens of the step."""
    for micro_batch in micro_batches:
        loss = model(**micro_batch, num_items_in_batch=num_step_tokens).loss
        (loss * num_ranks).backward()


# Trainer runs in one process here, so plans have one rank.
TRAINER_PLANS = (LoaderPlan(num_samples=13, batch_size=6, num_epochs=2),)


def trainer_step(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    _num_step_tokens: int,
    _num_ranks: int,
) -> None:
    """Accumulate by one step of Trainer, which counts the label tokens itself.

    The gradients are those that reach the optimizer. Its learning rate of 0 changes nothing.
    """
    from transformers import Trainer, TrainerCallback

    gradients: dict[str, Tensor] = {}

    class KeepGradients(TrainerCallback):
        """Copies gradients just before the optimizer steps."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                gradients[name] = torch.zeros_like(parameter) if grad is None else grad.clone()

    class GivenBatches(Trainer):
        """Trains on given micro-batches."""

        def get_train_dataloader(self) -> Any:  # noqa: ANN401
            return [dict(micro_batch) for micro_batch in micro_batches]

    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        _make_trainer(
            GivenBatches,
            model,
            [{}],
            KeepGradients(),
            output_dir=str(folder),
            max_steps=1,
            gradient_accumulation_steps=len(micro_batches),
            learning_rate=0.0,
            max_grad_norm=0.0,
        ).train()
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


class TrainerRun:
    """A training run by Trainer, as an iterable of epochs. Its state is a checkpoint."""

    def __init__(self, plan: LoaderPlan, resumed: ResumePoint | None) -> None:
        self._plan = plan
        self._resumed = resumed
        self._num_drawn = 0

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        plan, resumed = self._plan, self._resumed
        seen = _train(plan, resumed.state if resumed else None)
        full, rest = divmod(plan.num_samples, plan.batch_size)
        per_epoch = full + (rest > 0 and not plan.drop_last)
        first, before = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
        for epoch in range(first, plan.num_epochs):
            count = per_epoch - (before if epoch == first else 0)
            yield self._draw(seen[:count])
            seen = seen[count:]

    def _draw(self, batches: Sequence[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            self._num_drawn += 1
            yield batch

    def state_dict(self) -> int:
        """Return the number of drawn batches. A resumed run writes a checkpoint after as many steps."""
        return self._num_drawn


def _train(plan: LoaderPlan, num_steps: object) -> list[list[int]]:
    """Return the batches that the model got, after a resume from `num_steps` if it is a number."""
    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        resume_from = None
        if isinstance(num_steps, int):
            _run_trainer(plan, folder, stop_after=num_steps)
            resume_from = str(folder / f"checkpoint-{num_steps}")
        return _run_trainer(plan, folder, resume_from=resume_from)


def _run_trainer(
    plan: LoaderPlan, folder: Path, stop_after: int | None = None, resume_from: str | None = None
) -> list[list[int]]:
    from transformers import Trainer, TrainerCallback

    class StopAndSave(TrainerCallback):
        """Stops the run with a checkpoint after a number of steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
            if state.global_step == stop_after:
                control.should_save = control.should_training_stop = True

    model = _Recorder()
    _make_trainer(
        Trainer,
        model,
        [{"number": number} for number in range(plan.num_samples)],
        StopAndSave(),
        output_dir=str(folder),
        num_train_epochs=plan.num_epochs,
        per_device_train_batch_size=plan.batch_size,
        dataloader_num_workers=plan.num_workers,
        dataloader_drop_last=plan.drop_last,
        seed=plan.seed,
        remove_unused_columns=False,
    ).train(resume_from_checkpoint=resume_from)
    return model.seen


def _make_trainer(
    kind: "type[Trainer]",
    model: nn.Module,
    samples: Sequence[Mapping[str, int]],
    callback: "TrainerCallback",
    **arguments: Any,  # noqa: ANN401 - of TrainingArguments
) -> "Trainer":
    """Make a Trainer on the host that prints and saves nothing by itself."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    quiet = TrainingArguments(
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **arguments
    )
    data: Any = samples
    trainer: Trainer = kind(model=model, args=quiet, train_dataset=data, callbacks=[callback])
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer


class _Recorder(nn.Module):
    """A model with one parameter that records the numbers of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, number: Tensor) -> Mapping[str, Tensor]:
        self.seen.append(number.tolist())
        return {"loss": self.weight * number.float().mean()}


ONE_BOS = "a text begins with one BOS, and a chat is tokenized once"


class ModelTokenizer(NamedTuple):
    """A model's tokenizer."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    """Ids that end generation; empty if no file declares them."""
    report: SubjectReport
    """Findings of core's level `load`."""


def open_tokenizer(model: str, remote_code: RemoteCode) -> ModelTokenizer:
    """Load the tokenizer of a model or of a folder without a model.

    Raises: UsageError if there is none.
    """
    folder, config = Path(model).expanduser(), None
    with ExitStack() as stack:
        if not folder.is_dir() or (folder / "config.json").is_file():
            source = resolve_model(model)
            if source.kind == "micro":
                raise UsageError(
                    f"{model} has no tokenizer: name a folder with one, or no MODEL for generated ones"
                )
            folder = stack.enter_context(weightless_folder(source, remote_code))
            config = load_config(folder, remote_code)
        tokenizer, eos_token_ids = load_tokenizer(folder, remote_code), _eos_ids(folder)
    if config is None:  # one whose vocabulary fits the tokenizer
        from transformers import PretrainedConfig

        config = PretrainedConfig()
        config.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
    wrong, notes = check_tokenizer(tokenizer, config, eos_token_ids)
    report = SubjectReport.promising(f"the tokenizer of {model}", (ONE_BOS,))
    report.judge([ONE_BOS], [Fault(ONE_BOS, "; ".join(wrong))] if wrong else [])
    for note in notes:
        report.note(note)
    return ModelTokenizer(tokenizer, eos_token_ids, report)


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that end generation from generation_config.json, or else from config.json."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        ids = read_json_object(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def run_checks(request: DataRequest, progress: Progress) -> DataAnswer:
    """Run every check that the request asks for, in a process of its own."""
    # Workers of data loaders are forked, since a new interpreter cannot import users' files.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # more threads are slower on models of this size
    plan = ChecksPlan(request)
    checks = plan.checks()
    answer = DataAnswer(checks=[], left_out=plan.left_out, notes=plan.notes)
    with progress.task("checks properties", len(checks)) as task:
        for check in checks:
            with progress.step(f"{check.level}: {check.name}"):
                try:
                    found = CheckReport(level=check.level, report=check.run())
                except RaisedError as error:
                    if check.is_own:
                        answer.errors.append(str(error))
                    nothing = SubjectReport(subject=check.name, cases={})
                    found = CheckReport(level=check.level, report=nothing, problem=str(error))
            answer.checks.append(found)
            task.advance()
    if len(answer.errors) == len(checks):
        raise RaisedError("\n".join(answer.errors))
    return answer


@dataclass
class ChecksPlan:
    """The checks of a request, and the reasons why levels have none."""

    request: DataRequest
    left_out: dict[DataLevel, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> ModelTokenizer | None:
        """Open the tokenizer of MODEL, if there is one."""
        name = self.request.model
        return None if name is None else open_tokenizer(name, self.request.remote_code)

    def checks(self) -> list[PlannedCheck]:
        """Return all checks in the order of the levels, and fill `left_out` and `notes`."""
        if self.request.model is None and not self.request.own_code:
            found = [*library_checks()]
            self.notes += [
                f"{library} is not installed: {left_out} not checked"
                for library, left_out in _OPTIONAL.items()
                if not is_installed(library)
            ]
        else:
            found = [*self._chat_checks(), *self._own_checks()]
        planned = {check.level for check in found}
        absent = [level for level in LEVELS if level not in planned]
        self.left_out = dict.fromkeys(absent, NOT_ASKED_FOR) | self.left_out
        return sorted(found, key=lambda check: LEVELS.index(check.level))

    def _chat_checks(self) -> Iterator[PlannedCheck]:
        request, model = self.request, self.model
        if model is not None:
            yield PlannedCheck("chat", model.report.subject, lambda: model.report)
        labelled = True
        if (code := request.own_code.get("render")) is not None:
            subject = Subject(code)
            render = cast("Render", load_object(code))
        elif model is None:
            return
        elif not model.tokenizer.chat_template:
            why = "the tokenizer has no chat template: give --render"
            self.left_out |= {"chat": why, "labels": why}
            return
        else:
            subject = Subject(f"chat template of {request.model}")
            render = render_by_template
            labelled = marks_assistant(model.tokenizer)
        tokenizers = [model.tokenizer] if model else micro_tokenizers()
        eos = model.eos_token_ids if model else ()
        chat = partial(check_chat, subject, render, tokenizers, eos, request.truncation)
        yield PlannedCheck("chat", subject.name, chat)
        if labelled:
            labels = partial(check_labels, subject, render, tokenizers)
            yield PlannedCheck("labels", subject.name, labels)
        else:
            self.left_out["labels"] = (
                "the chat template has no {% generation %} marks, so transformers cannot tell the"
                " assistant's tokens: give --render"
            )

    def _own_checks(self) -> Iterator[PlannedCheck]:
        own = {name: cast("Any", load_object(file)) for name, file in self.request.own_code.items()}
        tokenizers = [self.model.tokenizer] if self.model else padding_tokenizers()
        features = self.request.features
        loader = own.get("loader", torch_loader)
        planned: list[tuple[str, DataLevel, Any, tuple[Any, ...]]] = [
            ("collator", "collator", check_padding, (tokenizers, features)),
            ("packing", "packing", check_packing, (tokenizers, features)),
            ("sampler", "sampler", check_sampling, ()),
            ("batch_sampler", "batch-sampler", check_sampling, (BATCH_SAMPLER_PLANS,)),
            ("accumulation", "accumulation", check_accumulation, ()),
            ("loader", "workers", check_loader, ()),
            ("dataset", "workers", check_dataset, (loader,)),
        ]
        for option, level, check, arguments in planned:
            if option in own:
                name = self.request.own_code[option]
                run = partial(check, Subject(name), own[option], *arguments)
                yield PlannedCheck(level, name, run)
