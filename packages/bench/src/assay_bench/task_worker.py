"""The evaluation process: loads a model and runs lm-eval on it, task by task.

lm-eval's class for transformers models gets the model, a byte tokenizer, and progress in place of its bars.
"""

import logging
import math
import os
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError, MachineError, UsageError
from assay.files import seal, write_whole
from assay.foreign_text import shorten
from assay.launch import ProcessError
from assay.models import LoadedModel, load_model
from assay.models.candidate_code import set_up
from assay.models.config_files import first_line, load_tokenizer
from assay.models.load import choose_threads
from assay.models.micro.recipes import BOS_ID
from assay.models.sources import local_folder
from assay.progress import subtask
from assay.runs import Progress
from assay_bench.lm_eval_files import GUESS
from assay_bench.right_options import describe_wrong_labels
from assay_bench.run_tasks import (
    BATCH_SIZE,
    DONE_FILE,
    FAILURE_FILE,
    EvaluationRequest,
    is_local,
    load_task,
    make_task_error,
    make_unknown_task_error,
    task_folder,
)

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from assay.devices.base import Device

_BOS, _PAD = "<bos>", "<pad>"


def evaluate(options: EvaluationRequest, progress: Progress) -> None:
    """Write results and samples of every task."""
    progress.number_phases(3)
    with progress.step("loading lm-eval"):
        import lm_eval

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        configs, manager = load_tasks(options)
    run = parse_run(options.run)
    device = open_run(run)
    with progress.step(f"loading {options.model} on {run}"):
        loaded = load_model(
            options.model,
            dtype=run.dtype,
            device=device.torch_device,
            remote_code=options.remote_code,
        ).require_language_model()
        _refuse_masked_model(loaded)
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
        loaded = replace(loaded, model=set_up(loaded.model, options.setup))
    facts = {
        "name": f"{options.model} on {options.run}",
        "model": options.model,
        "run": options.run,
        "setup": options.setup,
        "machine": f"{device.product()}, {torch.backends.cpu.get_cpu_capability()}",
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "versions": {"lm_eval": lm_eval.__version__} | dict(device.versions()),
        "clusters": options.suite.clusters,
    }
    language_model = open_language_model(loaded, options)
    with progress.task(f"evaluating {options.model}", len(options.suite.tasks), "tasks") as bar:
        for task in options.suite.tasks:
            with subtask(task):
                _run_task(task, configs[task], manager, options, language_model, device, facts)
            bar.advance()


def _refuse_masked_model(loaded: LoadedModel) -> None:
    """Refuse a model of transformers that predicts masked tokens. A model's own code may lack generate alone."""
    of_transformers = type(loaded.model).__module__.startswith("transformers.")
    if of_transformers and not loaded.can_generate:
        raise UsageError(
            f"{loaded.source.reference}: {type(loaded.model).__name__} does not generate, and lm-eval scores"
            " next tokens; `assay check generate` and `assay check load` are for it"
        )


def load_tasks(options: EvaluationRequest) -> tuple[dict[str, str | dict[str, Any]], "TaskManager"]:
    """Return the configuration of every task, and lm-eval's index for them, which takes seconds to make.

    Raises: UsageError for a task that lm-eval does not know.
    """
    from lm_eval.tasks import TaskManager

    tasks = options.suite.tasks
    names = [task for task in tasks if not is_local(task)]
    manager = TaskManager(include_defaults=bool(names))
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise make_unknown_task_error(unknown[0], manager.all_tasks)
    folders = {task: task_folder(options.folder, task) / "documents" for task in tasks}
    return {task: load_task(task, folder) for task, folder in folders.items()}, manager


def _run_task(
    task: str,
    config: str | dict[str, Any],
    manager: "TaskManager",
    options: EvaluationRequest,
    language_model: "HFLM",
    device: "Device",
    facts: dict[str, Any],
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import handle_arg_string

    folder = task_folder(options.folder, task)
    tracker = EvaluationTracker(output_path=str(folder / "results.json"))
    with warnings.catch_warnings(), device.execution(), nan_calls_of(language_model.model) as wrong:
        warnings.simplefilter("ignore")  # libraries warn about each other
        with _one_line_errors(task), checked_documents():
            results: Any = simple_evaluate(
                model=language_model,
                tasks=[config],
                task_manager=manager,
                num_fewshot=options.suite.fewshot,
                limit=options.limit,
                apply_chat_template=options.apply_chat_template,
                system_instruction=options.system_instruction,
                gen_kwargs={
                    name: handle_arg_string(text) for name, text in options.gen_kwargs.items()
                },
                bootstrap_iters=0,
                evaluation_tracker=tracker,
            )
    samples = results.pop("samples")
    for name in samples:
        _add_guesses(samples[name], results["configs"][name]["output_type"], language_model)
    facts = facts | {"num_nan_calls": len(wrong)}
    if wrong:
        facts["nan_weights"] = find_nan_weights(language_model.model)
    tracker.save_results_aggregated(results=results | {"assay": facts}, samples=samples)
    for name in samples:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    if not any(folder.glob("results_*.json")):
        # lm-eval only logs that it could not write.
        raise MachineError(f"lm-eval could not write its results into {folder}")
    write_whole(folder / DONE_FILE, seal(options.key()))


def _add_guesses(samples: list[dict[str, Any]], output_type: str, language_model: "HFLM") -> None:
    """Add the log probability of a guess by frequency to each sample of a text that the model has to find probable."""
    if output_type not in ("loglikelihood", "loglikelihood_rolling"):
        return
    tokens = [_predicted_tokens(sample["arguments"][0], language_model) for sample in samples]
    for sample, guess in zip(samples, guess_by_frequency(tokens), strict=True):
        sample[GUESS] = guess


def _predicted_tokens(arguments: Sequence[str], language_model: "HFLM") -> list[int]:
    """Return the tokens whose probabilities lm-eval adds up: those of the text, or of the text after a context."""
    if len(arguments) > 1 and arguments[0]:
        _, predicted = language_model._encode_pair(arguments[0], arguments[1])  # noqa: SLF001
        return list(predicted)
    return list(language_model.tok_encode(arguments[-1]))


def guess_by_frequency(texts: Sequence[Sequence[int]]) -> list[float]:
    """Return the log probability of each text, if a token is as probable as it is frequent in all of them."""
    counts = Counter(token for text in texts for token in text)
    total = counts.total()
    return [math.fsum(math.log(counts[token] / total) for token in text) for text in texts]


def find_nan_weights(model: torch.nn.Module) -> list[str]:
    """Name the parameters and buffers that hold NaN or infinity. A buffer may hold the minus infinity of a mask."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values = ((name, one.float()) for name, one in tensors)
    return [name for name, one in values if bool((one.isnan() | one.isposinf()).any())]


@contextmanager
def nan_calls_of(model: torch.nn.Module) -> Iterator[list[None]]:
    """Return a list with an entry for each call inside the context that gives NaN or infinity for the next token.

    Generated text does not show them: the largest of NaN is some token.
    """
    found: list[None] = []

    def check(_model: object, _inputs: object, output: Mapping[str, torch.Tensor]) -> None:
        last = output["logits"][:, -1]  # padded positions before it may hold anything
        found.extend([None] * bool((last.isnan() | last.isposinf()).any()))

    handle = model.register_forward_hook(check)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def checked_documents() -> Iterator[None]:
    """Make lm-eval check the documents of each task inside the context before it asks the model about them.

    Raises: UsageError for documents that `find_document_problem` finds.
    """
    from lm_eval.api.task import ConfigurableTask

    build = ConfigurableTask.build_all_requests

    def check_and_build(task: "ConfigurableTask", **options: Any) -> None:  # noqa: ANN401 - lm-eval's
        documents = task.doc_iterator(limit=options.get("limit"), samples=options.get("samples"))
        if problem := find_document_problem(task, documents):
            raise make_task_error(task.config.task, problem)
        build(task, **options)

    ConfigurableTask.build_all_requests = check_and_build
    try:
        yield
    finally:
        ConfigurableTask.build_all_requests = build


_WORD = re.compile(r"[^\W\d]\w*")


def find_document_problem(
    task: "ConfigurableTask", documents: Iterable[tuple[int, Mapping[str, Any]]]
) -> str:
    """Name a word of the task that is not a field, or documents without a right answer among their choices.

    Returns: "" for a sound task, and for documents whose fields lm-eval cannot read, which it reports.
    """
    config = task.config

    def not_a_field(key: str) -> str:
        word = getattr(config, key)
        is_wrong = isinstance(word, str) and _WORD.fullmatch(word) and word not in task.features
        fields = ", ".join(task.features)
        return f"{key}: {word} is not a field of the documents ({fields})" if is_wrong else ""

    if task.prompt is None and (problem := not_a_field("doc_to_text")):
        return problem
    if task.OUTPUT_TYPE != "multiple_choice" or config.process_results is not None:
        return ""
    wrong, num_documents = [], 0
    for number, document in documents:
        num_documents += 1
        with suppress(Exception):
            choices = task.doc_to_choice(document)
            label = (task.doc_to_text if task.multiple_input else task.doc_to_target)(document)
            labels = label if isinstance(label, list) and task.multiple_target else [label]
            allowed = choices if isinstance(label, str) else range(len(choices))
            if not any(one in allowed for one in labels):
                wrong.append((number, label, len(choices)))
    return (wrong and not_a_field("doc_to_target")) or describe_wrong_labels(wrong, num_documents)


@contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    """Raise UsageError for a task that lm-eval cannot download, and name a document that it cannot use."""
    try:
        yield
    except (ConnectionError, FileNotFoundError) as error:
        raise make_task_error(
            task,
            f"its documents are on the Hugging Face hub, which cannot be reached ({first_line(error)}):"
            " run it once on a machine with network access and an HF_HOME that this machine shares, or"
            " use --suite offline",
        ) from None
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - of code of a task
        traceback.print_exc()  # into the log
        raise ProcessError(f"lm-eval failed: {describe_failure(error, task)}") from None


def describe_failure(error: BaseException, task: str = "") -> str:
    """Describe an exception in lm-eval's code, with its task and document, if frames of its traceback know them.

    task: the task, if it is known.
    """
    if isinstance(error, AssayError):
        return str(error)
    document, asked, text = None, None, _cause_in_words(error)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        if asked is not None and "doc" in names:
            document = asked  # a loop keeps its last document after its end
        if frame.f_code.co_name == "doc_to_choice" and isinstance(names.get("doc_to_choice"), str):
            text = (
                f"doc_to_choice: {names['doc_to_choice']} is not a field of the documents"
                f" ({', '.join(names['doc'])}), and does not give a list as a template"
            )
        if frame.f_globals.get("__name__", "").startswith("lm_eval.") and "doc_id" in names:
            asked = names["doc_id"]
            owner = getattr(names.get("self", names.get("task")), "config", None)
            task = task or str(getattr(owner, "task", ""))
        if isinstance(error, IndexError) and "test_choice" in names:
            # A task of lm-eval looks up the first label when it is made.
            owner = names["self"]
            task = task or str(owner.config.task)
            text = find_document_problem(owner, enumerate(owner.task_docs)) or text
    place = [f"task {task}"] if task else []
    place += [] if document is None else [f"document {document}"]
    return f"{', '.join(place)}: {text}" if place else text


def _cause_in_words(error: BaseException) -> str:
    """Describe an exception without its class, and show the code that raised it if the message alone says little."""
    told = first_line(error)
    match error:
        case KeyError(args=[str(sentence)]) if " " in sentence:
            return shorten(sentence.partition("\n")[0])
        case KeyError():
            problem = f"{told} is missing"
        case TypeError() | AttributeError() | IndexError():
            problem = "a value has the wrong type or is missing"
            problem += f" ({told})" if error.args else ""
        case _:
            return told
    frames = traceback.extract_tb(error.__traceback__)
    # Not code of a library that lm-eval calls, but perhaps a task's own.
    own = [one for one in frames if "lm_eval" in one.filename or "-packages" not in one.filename]
    place = [*frames, *own][-1]
    return f"{problem}, in {place.name}: `{shorten(place.line or '')}`"


def open_language_model(loaded: LoadedModel, options: EvaluationRequest) -> "HFLM":
    """Wrap the model as an lm-eval model."""
    from lm_eval.models import huggingface

    if loaded.tokenizer_kind == "none":
        raise UsageError(f"{options.model} has no tokenizer, which lm-eval needs")
    starts_with_bos = loaded.encode("")[:1] == [BOS_ID]
    if loaded.tokenizer_kind == "bytes":
        tokenizer = byte_tokenizer(loaded.pad_token_id, starts_with_bos=starts_with_bos)
    else:
        with local_folder(loaded.source, options.remote_code) as folder:
            tokenizer = load_tokenizer(folder, options.remote_code)
    if options.apply_chat_template and not tokenizer.chat_template:
        raise UsageError(
            f"--apply-chat-template: the tokenizer of {options.model} has no chat template"
        )
    huggingface.tqdm = BarAsTask
    return huggingface.HFLM(
        pretrained=loaded.model,
        tokenizer=tokenizer,
        batch_size=options.batch_size or BATCH_SIZE,
        max_length=loaded.max_positions,
        softmax_dtype="float32",
        add_bos_token=True if loaded.tokenizer_kind == "bytes" and starts_with_bos else None,
    )


def byte_tokenizer(pad_id: int, *, starts_with_bos: bool) -> PreTrainedTokenizerFast:
    """Make the tokenizer of models that read bytes. Its ids are those of `assay.models`."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary |= {_BOS: BOS_ID} | ({_PAD: pad_id} if pad_id not in (BOS_ID, *range(256)) else {})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if starts_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", special_tokens=[(_BOS, BOS_ID)]
        )
    pad = _PAD if _PAD in vocabulary else _BOS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BOS, eos_token=_BOS, pad_token=pad
    )


class BarAsTask:
    """A replacement for tqdm that shows each bar as a subtask of the open task."""

    def __init__(
        self,
        items: Collection[Any] = (),
        *,
        total: int | None = None,
        desc: str | None = None,
        **_: object,
    ) -> None:
        self._items, self._stack = items, ExitStack()
        task = subtask((desc or "prepares texts").lower(), total or len(items), "texts")
        self.update = self._stack.enter_context(task).advance
        self.close = self._stack.close

    def __iter__(self) -> Iterator[Any]:
        with self._stack:
            for item in self._items:
                yield item
                self.update()


def run_lm_eval() -> None:
    """Run lm-eval's command line, and write the message of an error into the file that FAILURE_FILE names."""
    from lm_eval.__main__ import cli_evaluate

    try:
        with checked_documents():
            cli_evaluate()
    except Exception as error:
        write_whole(Path(os.environ[FAILURE_FILE]), describe_failure(error))
        raise


if __name__ == "__main__":
    run_lm_eval()
