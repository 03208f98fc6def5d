"""The checks of a request or of the installed libraries, and the process that runs them."""

import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from assay.errors import UsageError
from assay.files import read_json_object
from assay.models.config_files import load_config, load_tokenizer
from assay.models.inspect.inspection import check_tokenizer
from assay.models.sources import RemoteCode, resolve_model, weightless_folder
from assay.plugins import load_object
from assay.runs import Progress
from assay_smoke.data.accumulation import check_accumulation
from assay_smoke.data.chats import check_chat, check_labels
from assay_smoke.data.collating import check_packing, check_padding
from assay_smoke.data.protocols import (
    IGNORED,
    Collate,
    Feature,
    Message,
    Render,
    RenderedChat,
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
    DataAnswer,
    DataLevel,
    DataRequest,
    Fault,
    RaisedError,
    Subject,
    SubjectReport,
)


class PlannedCheck(NamedTuple):
    """A check of one subject."""

    level: DataLevel
    subject: str
    run: Callable[[], SubjectReport]


def _library_checks(answer: DataAnswer) -> Iterator[PlannedCheck]:
    """Yield the checks of the installed libraries. A note in `answer` names an absent one."""
    from transformers import (
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorWithFlattening,
    )

    def of(library: str, level: DataLevel, part: str, check: Any, *arguments: Any) -> PlannedCheck:  # noqa: ANN401
        subject = Subject(f"{library} {version(library)} {part}")
        return PlannedCheck(level, subject.name, partial(check, subject, *arguments))

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
    if find_spec("trl") is None:
        answer.notes.append("trl is not installed: its collator is not checked")
    else:
        unpadded = partial(_trl_collator, padding_free=True)
        yield of("trl", "collator", lm, check_padding, _trl_collator, padding)
        yield of("trl", "packing", f"{lm}(padding_free=True)", check_packing, unpadded, padding)
    yield hf("accumulation", "num_items_in_batch", check_accumulation, _backward_by_model_loss)
    yield of("torch", "workers", "DataLoader", check_loader, torch_loader)
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
    items: Any = dataset
    return DataLoader(items, 2, num_workers=num_workers, collate_fn=list)


def _masked(samples: Sequence[Feature], seed: int | None) -> Sequence[object]:
    """Return samples whose tokens a collator masks at random."""
    from transformers import DataCollatorForLanguageModeling

    collator: Any = DataCollatorForLanguageModeling(micro_tokenizer(), seed=seed)
    return ComputedItems(len(samples), lambda item: collator([samples[item]]))


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
    answer = DataAnswer()
    checks = plan_checks(request, answer)
    with progress.task("checks properties", len(checks)) as task:
        for level, subject, check in checks:
            with progress.step(f"{level}: {subject}"):
                try:
                    report = check()
                except RaisedError as error:
                    if not request.is_of_libraries:
                        answer.errors.append(str(error))
                    report = SubjectReport(subject=subject, cases={}, problem=str(error))
            answer.reports.append((level, report))
            task.advance()
    if len(answer.errors) == len(checks):
        raise RaisedError("\n".join(answer.errors))
    return answer


def plan_checks(request: DataRequest, answer: DataAnswer) -> list[PlannedCheck]:
    """Return all checks in the order of the levels, with what is left out in `answer`."""
    # A wrong name is reported before the tokenizer is loaded.
    own = {option: cast("Any", load_object(code)) for option, code in request.own_code.items()}
    model = None if request.model is None else open_tokenizer(request.model, request.remote_code)
    if request.is_of_libraries:
        found = [*_library_checks(answer)]
    else:
        found = [*_chat_checks(request, own, model, answer), *_own_checks(request, own, model)]
    return sorted(found, key=lambda check: LEVELS.index(check.level))


def _chat_checks(
    request: DataRequest, own: Mapping[str, Any], model: ModelTokenizer | None, answer: DataAnswer
) -> Iterator[PlannedCheck]:
    code = request.own_code.get("render")
    tokenizers = [model.tokenizer] if model else micro_tokenizers()
    eos_token_ids = model.eos_token_ids if model else ()
    if model is not None:
        yield PlannedCheck("chat", model.report.subject, lambda: model.report)
        if code is None and not model.tokenizer.chat_template:
            why = "the tokenizer has no chat template: give --render"
            answer.left_out |= {"chat": why, "labels": why}
            return
    elif code is None:
        return
    subject = Subject(code or f"chat template of {request.model}")
    render: Render = own.get("render", render_by_template)
    chat = partial(check_chat, subject, render, tokenizers, eos_token_ids, request.truncation)
    yield PlannedCheck("chat", subject.name, chat)
    if code is None and not marks_assistant(tokenizers[0]):
        answer.left_out["labels"] = (
            "the chat template has no {% generation %} marks, so transformers cannot tell the"
            " assistant's tokens: give --render"
        )
        return
    yield PlannedCheck("labels", subject.name, partial(check_labels, subject, render, tokenizers))


def _own_checks(
    request: DataRequest, own: Mapping[str, Any], model: ModelTokenizer | None
) -> Iterator[PlannedCheck]:
    batching = ([model.tokenizer] if model else padding_tokenizers(), request.features)
    planned: list[tuple[str, DataLevel, Any, tuple[Any, ...]]] = [
        ("collator", "collator", check_padding, batching),
        ("packing", "packing", check_packing, batching),
        ("sampler", "sampler", check_sampling, ()),
        ("batch_sampler", "batch-sampler", check_sampling, (BATCH_SAMPLER_PLANS,)),
        ("accumulation", "accumulation", check_accumulation, ()),
        ("loader", "workers", check_loader, ()),
        ("dataset", "workers", check_dataset, (own.get("loader", torch_loader),)),
    ]
    for option, level, check, arguments in planned:
        if option in own:
            name = request.own_code[option]
            yield PlannedCheck(level, name, partial(check, Subject(name), own[option], *arguments))
