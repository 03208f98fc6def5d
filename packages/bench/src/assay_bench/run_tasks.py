"""Runs suites of tasks in a folder: by our own process, or by lm-eval's command line with any backend.

Documents of the offline tasks depend only on the version of Python. They contain sums, and text of the standard library
that no micro model was trained on. `source` names the piece of text of an item: items of one piece form a cluster.
"""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from assay.devices.run_string import parse_run
from assay.errors import UsageError, suggest
from assay.files import (
    UnreadableFileError,
    open_file,
    read_json_object,
    read_sealed_json,
    read_text,
    read_toml_record,
    refuse_link,
    write_whole,
)
from assay.launch import ProcessError, RemoteFunction, call
from assay.models.micro.recipes import standard_library_text
from assay.models.sources import RemoteCode, hash_files, resolve_model
from assay.runs import Progress
from assay.runs.provenance import redact
from assay.runs.results import VERDICT_FILE
from assay.verdicts import Record
from assay.watchdog import temporary_folder
from assay_bench.comparing import SuiteTerms, Terms
from assay_bench.lm_eval_files import (
    MANIFEST,
    find_results,
    read_manifest,
    write_manifest,
)
from assay_bench.lm_eval_metrics import METRICS, inverted_metric

Document = Mapping[str, Any]

_SEED = 0
_PIECE_LENGTH = 4_096
_MAX_ITEMS = 500

_CHOICE_CONTEXT, _CHOICE_LENGTH, _NUM_CHOICES = 96, 12, 4
_CLOZE_CONTEXT, _LETTERS_GIVEN = 96, 3
_ROLLING_LENGTH, _MAX_TEXTS = 256, 250
# Small enough that a micro model learns some sums.
_LARGEST_NUMBER = 49

_WORD = re.compile(r"(?<=[a-z,] )[a-z]{5,12}(?=[ .,\n])")


def documents_of(task: str) -> Sequence[Document]:
    """Return the documents of an offline task. Raises: KeyError for any other task."""
    return _MAKERS[task]()


def _next_text() -> Sequence[Document]:
    """Make contexts, each with its continuation and three continuations of other contexts."""
    rng = random.Random(_SEED)  # noqa: S311 - a reproducible choice, not a secret
    pieces = _pieces()
    places = [
        (number, start)
        for number, piece in enumerate(pieces)
        for start in range(_CHOICE_CONTEXT, len(piece) - _CHOICE_LENGTH, 256)
    ]
    documents: list[Document] = []
    for number, start in rng.sample(places, min(_MAX_ITEMS, len(places))):
        right = pieces[number][start : start + _CHOICE_LENGTH]
        choices = [right]
        while len(choices) < _NUM_CHOICES:
            other, at = rng.choice(places)
            wrong = pieces[other][at : at + _CHOICE_LENGTH]
            if wrong not in choices:
                choices.append(wrong)
        rng.shuffle(choices)
        documents.append(
            {
                "context": pieces[number][start - _CHOICE_CONTEXT : start],
                "choices": choices,
                "label": choices.index(right),
                "source": f"piece {number}",
            }
        )
    return documents


def _cloze() -> Sequence[Document]:
    """Make texts that end inside a word, each with the rest of the word."""
    rng = random.Random(_SEED)  # noqa: S311 - reproducible
    found = [
        (number, match)
        for number, piece in enumerate(_pieces())
        for match in _WORD.finditer(piece, _CLOZE_CONTEXT)
    ]
    return [
        {
            "context": match.string[
                match.start() - _CLOZE_CONTEXT : match.start() + _LETTERS_GIVEN
            ],
            "rest": match[0][_LETTERS_GIVEN:],
            "source": f"piece {number}",
        }
        for number, match in rng.sample(found, min(_MAX_ITEMS, len(found)))
    ]


def _library_text() -> Sequence[Document]:
    return [
        {"text": piece[start : start + _ROLLING_LENGTH], "source": f"piece {number}"}
        for number, piece in enumerate(_pieces())
        for start in range(0, len(piece) - _ROLLING_LENGTH, 2 * _ROLLING_LENGTH)
    ][:_MAX_TEXTS]


def _addition() -> Sequence[Document]:
    rng = random.Random(_SEED)  # noqa: S311 - reproducible
    pairs = [(a, b) for a in range(_LARGEST_NUMBER + 1) for b in range(_LARGEST_NUMBER + 1)]
    return [{"question": f"{a}+{b}=", "sum": str(a + b)} for a, b in rng.sample(pairs, _MAX_ITEMS)]


@cache
def _pieces() -> list[str]:
    _, held_out = standard_library_text()
    text = held_out.decode(errors="ignore")
    return [text[start : start + _PIECE_LENGTH] for start in range(0, len(text), _PIECE_LENGTH)]


_MAKERS: Mapping[str, Callable[[], Sequence[Document]]] = {
    "next-text": _next_text,
    "cloze": _cloze,
    "library-text": _library_text,
    "addition": _addition,
}

TASKS = tuple(_MAKERS)


_SUITES = Path(str(files("assay_bench") / "battery" / "suites"))


class TaskSuite(Record):
    """A suite of tasks."""

    tasks: list[str] = Field(min_length=1)
    """Names of offline tasks or of lm-eval, or YAML files in the folder of the suite."""
    clusters: dict[str, str] = Field(default_factory=dict)
    """For each task, the document field that names the cluster."""
    fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; None for the default of each task."""
    terms: Terms = Field(default_factory=Terms)
    name: Annotated[str, Field(exclude=True)] = ""
    """The name, or the file's; "" for single tasks."""

    @property
    def recorded(self) -> SuiteTerms:
        """Return what a comparison needs of it."""
        return SuiteTerms(name=self.name, terms=self.terms, clusters=self.clusters)


def read_suite(name: str) -> TaskSuite:
    """Read a shipped suite by its name, or FILE.toml.

    Raises: UsageError with the file, the key and the expected value.
    """
    path = Path(name) if name.endswith(".toml") else _SUITES / f"{name}.toml"
    if not path.exists():
        shipped = ", ".join(sorted(path.stem for path in _SUITES.glob("*.toml")))
        raise UsageError(f"suite {name} does not exist; shipped suites: {shipped}")
    suite = read_toml_record(TaskSuite, path)
    tasks = [
        os.path.realpath(path.parent / task) if task.endswith(_YAML) else task
        for task in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tasks, "name": Path(name).name})


# yaml reads about 100 KB/s. The largest task file of lm-eval has 63 KB.
_MAX_BYTES = 1 << 17
_NUM_FIRST_BYTES = 1 << 10

_FOLDER = Path(str(files("assay_bench") / "battery" / "tasks"))

_YAML = (".yaml", ".yml")


def make_task_error(task: str, problem: str) -> UsageError:
    """Make the error for a task."""
    return UsageError(f"task {task}: {problem}")


def make_unknown_task_error(name: str, known: Iterable[str]) -> UsageError:
    """Make the error for a name that is not among the `known` names of lm-eval."""
    nearest = get_close_matches(name, [*TASKS, *known], n=3)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`lm-eval ls tasks` lists all"
    return make_task_error(name, f"lm-eval does not know this name; {hint}")


def load_task(task: str, folder: Path) -> str | dict[str, Any]:
    """Return the configuration of an offline task or a YAML file; return any other name unchanged.

    folder: the documents of an offline task are written there.
    Raises: UsageError for an invalid file, for a metric that lm-eval would leave out, or without the local
        documents that it names.
    """
    if task in TASKS:
        documents = folder / f"{task}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(document) + "\n" for document in documents_of(task))
        documents.write_text("".join(lines), encoding="utf-8")
        return _parse(_FOLDER / f"{task}.yaml") | {
            "dataset_kwargs": {"data_files": {"test": str(documents)}}
        }
    if not is_local(task):
        return task
    config = _parse(Path(task))
    _require_metrics(task, config)
    if config.get("dataset_path") == "json":
        found = _data_files(Path(task), config)
        config["dataset_kwargs"] = {"data_files": {name: str(file) for name, file in found.items()}}
    return config


def _require_metrics(task: str, config: dict[str, Any]) -> None:
    """Raise UsageError for a metric that lm-eval would leave out without an error, or turn around."""
    kind, entries = config.get("output_type", "generate_until"), config.get("metric_list")
    known = METRICS.get(kind, ()) if isinstance(kind, str) else ()
    for entry in entries if known and isinstance(entries, list) else []:
        name = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        if problem := inverted_metric((name, entry.get("higher_is_better"))):
            raise make_task_error(task, problem)
        if name not in known and not (kind == "generate_until" and entry.get("hf_evaluate")):
            raise make_task_error(task, suggest(f"metric of {kind}", name, known))


def _parse(path: Path) -> dict[str, Any]:
    config = _read_yaml(path, ())
    if not isinstance(config.get("task"), str):
        raise make_task_error(str(path), "the key task must hold a name")
    if Path(config["task"]).name != config["task"]:
        raise make_task_error(
            str(path),
            "the name under the key task must not contain /, because it becomes a file name",
        )
    return config


def _read_yaml(path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
    """Read a mapping, with the keys of the files under its key `include`, which are relative to it.

    including: the files that include this one.
    """
    if path in including:
        raise make_task_error(str(including[0]), f"{path} includes itself")
    text = read_text(path, _MAX_BYTES)
    try:
        # With aliases, a small file can stand for any number of values.
        aliases = [one for one in yaml.scan(text) if isinstance(one, yaml.AliasToken)]
        config = None if aliases else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableFileError.of(path, f"not plain YAML: {error}") from None
    if aliases:
        raise UnreadableFileError.of(path, f"*{aliases[0].value} is an alias: repeat the value")
    if not isinstance(config, dict):
        raise make_task_error(str(path), "expected keys with values, such as task: NAME")
    named = config.pop("include", [])
    included: dict[str, Any] = {}
    for one in named if isinstance(named, list) else [named]:
        included |= _read_yaml(path.parent / str(one), (*including, path))
    return included | config


def _data_files(path: Path, config: dict[str, Any]) -> dict[str, Path]:
    """Return the document files that a task file names, relative to its folder."""
    settings = config.get("dataset_kwargs")
    named = settings.get("data_files") if isinstance(settings, dict) else None
    if not isinstance(named, dict) or not named:
        raise make_task_error(str(path), "expected dataset_kwargs: data_files: {test: FILE.jsonl}")
    # Absolute, because lm-eval reads them in another folder.
    found = {str(split): path.absolute().parent / str(file) for split, file in named.items()}
    for file in found.values():
        with open_file(file) as documents:
            beginning = documents.read(_NUM_FIRST_BYTES)
        if not beginning.strip(b" []\n"):
            raise make_task_error(str(path), f"{file} has no documents")
    return found


DONE_FILE = "done.json"

# Of assay's own loader, and of lm-eval's class `hf`, whose own default of 1 is many times slower.
BATCH_SIZE = "32"


class Settings(Record):
    """Settings of lm-eval, by its names, that hold for all tasks."""

    limit: int | None = None
    """Number of documents of each task; None for all."""
    batch_size: str | None = None
    """Texts in a call of the model, or `auto`; None for the default."""
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: dict[str, str] = Field(default_factory=dict)
    """Arguments of generation, which replace those of the tasks."""


class EvaluationRequest(Settings):
    """A request to evaluate a model that assay loads."""

    model: str
    run: str
    suite: TaskSuite
    """For the process, with the tasks that have no results yet."""
    content: str = ""
    """Hash of the model's files, which `evaluate` adds; "" for a model on the hub."""
    setup: str | None = None
    """FILE.py:FUNC to call with the loaded model."""
    remote_code: RemoteCode = "refuse"
    folder: Path
    """Folder of the run."""

    def key(self) -> dict[str, Any]:
        """Return the settings that must be equal to keep the results of an interrupted run."""
        kept = self.model_dump(mode="json", exclude={"folder", "suite", "batch_size"})
        return kept | {"fewshot": self.suite.fewshot}


def task_folder(folder: Path, task: str) -> Path:
    """Return the folder of a task in the folder of a run."""
    return folder / "tasks" / (Path(task).stem if task.endswith(_YAML) else task)


_WORK: RemoteFunction[EvaluationRequest, None] = RemoteFunction("assay_bench.task_worker:evaluate")


def evaluate(request: EvaluationRequest, progress: Progress) -> None:
    """Run every task of `request` that has no results in its folder.

    Raises: UsageError, also for a folder with answers to other questions; MachineError or ProcessError.
    """
    folder, tasks = request.folder, request.suite.tasks
    parse_run(request.run)
    source = resolve_model(request.model)
    # A model on the hub is not opened.
    content = "" if source.kind == "hub" else hash_files(source, request.remote_code)
    request = request.model_copy(update={"content": content})
    _require_same_evaluation(request)
    (folder / VERDICT_FILE).unlink(missing_ok=True)
    remaining = [task for task in tasks if not _is_done(task_folder(folder, task))]
    if remaining:
        with temporary_folder("assay-bench-") as cache:
            environment = {"HF_DATASETS_CACHE": str(cache), "TQDM_DISABLE": "1"}
            if source.kind != "hub" and all(map(is_local, remaining)):
                environment["HF_HUB_OFFLINE"] = "1"
            suite = request.suite.model_copy(update={"tasks": remaining})
            request = request.model_copy(update={"suite": suite})
            call(
                _WORK,
                request,
                folder=folder,
                name="evaluation",
                progress=progress,
                environment=environment,
            )
    results = {one: find_results(task_folder(folder, one))[-1] for one in tasks}
    write_manifest(folder, results, request.suite.recorded if request.suite.name else None)


def is_local(task: str) -> bool:
    """Return True for an offline task and for a YAML file, False for a name of lm-eval."""
    return task in TASKS or task.endswith(_YAML)


def _require_same_evaluation(request: EvaluationRequest) -> None:
    """Raise UsageError if the folder has answers to other questions, or of another model."""
    folder, here = request.folder, request.key()
    done = sorted(folder.glob(f"tasks/*/{DONE_FILE}"))
    kept = [read_sealed_json(refuse_link(file)) for file in done]
    held = {file.parent.name for file in done}
    asked = {task_folder(folder, task).name for task in request.suite.tasks}
    is_same = held <= asked and all(one == here for one in kept)
    if os.path.lexists(folder / MANIFEST):
        held = {task_folder(folder, task).name for task in read_manifest(folder).results}
        is_same = is_same and held == asked
    if is_same:
        return
    limit = next((one["limit"] for one in kept if one.get("limit") is not None), None)
    facts = [
        f"{len(held)} task{'s'[: len(held) != 1]}, {f'--limit {limit}' if limit else 'no limit'}"
    ]
    facts += sorted(
        {
            f"its {name} is {one.get(name)}, here {here.get(name)}"
            for one in kept
            for name in (one.keys() | here.keys()) - {"limit"}
            if one.get(name) != here.get(name)
        }
    )
    raise UsageError(
        f"{folder} holds another evaluation ({'; '.join(facts)}): name a new folder with --output"
    )


def _is_done(folder: Path) -> bool:
    """Return True for complete results; remove any others."""
    if (folder / DONE_FILE).is_file():
        return True
    for file in (*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl")):
        file.unlink(missing_ok=True)
    return False


@dataclass(frozen=True, slots=True)
class Backend:
    """A model class of lm-eval, such as hf, vllm or local-completions, with its arguments."""

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """Copies of the model that share the documents, started by `accelerate launch`."""
    remote_code: RemoteCode = "refuse"

    @property
    def is_local(self) -> bool:
        """Return True if the model, and any tokenizer and adapter, are folders."""
        names = [self.arguments[key] for key in _MODEL_KEYS if key in self.arguments]
        return bool(names) and all(Path(name).is_dir() for name in names)


# Arguments of lm-eval's class `hf` that can name a repository on the hub.
_MODEL_KEYS = ("pretrained", "tokenizer", "peft", "delta")

# Variable with the file for the message of an error in lm-eval's process.
FAILURE_FILE = "ASSAY_BENCH_FAILURE_FILE"


def command_line(backend: Backend, suite: TaskSuite, settings: Settings, folder: Path) -> list[str]:
    """Write the task files into `folder` and return the command.

    Raises: UsageError for arguments that lm-eval would split.
    """
    names = [_task_name(task, folder) for task in suite.tasks]
    for key, value in backend.arguments.items():
        if "," in value:
            raise UsageError(f"--model-args {key}={value}: lm-eval splits its arguments at commas")
    arguments = ",".join(f"{key}={value}" for key, value in backend.arguments.items())
    start = [sys.executable, "-m"]
    if backend.processes > 1:
        start += ["accelerate.commands.launch", "--num_processes", str(backend.processes), "-m"]
    words = [*start, "assay_bench.task_worker", "run", "--model", backend.name]
    words += ["--tasks", ",".join(names)]
    words += ["--model_args", arguments] if arguments else []
    words += ["--include_path", str(_task_files(folder)), "--output_path", str(folder / "lm-eval")]
    words += [] if suite.fewshot is None else ["--num_fewshot", str(suite.fewshot)]
    size = settings.batch_size or (BATCH_SIZE if backend.name == "hf" else None)
    words += [] if size is None else ["--batch_size", size]
    words += [] if settings.limit is None else ["--limit", str(settings.limit)]
    words += ["--apply_chat_template"] if settings.apply_chat_template else []
    if settings.system_instruction is not None:
        words += ["--system_instruction", settings.system_instruction]
    if settings.gen_kwargs:
        words += ["--gen_kwargs", *(f"{key}={text}" for key, text in settings.gen_kwargs.items())]
    words += ["--trust_remote_code"] if backend.remote_code == "trust" else []
    return [*words, "--log_samples"]


def run_command_line(
    backend: Backend, suite: TaskSuite, settings: Settings, folder: Path, progress: Progress
) -> None:
    """Run lm-eval, with its output in `folder`/lm-eval.log, and write the manifest of its results.

    Raises: UsageError if the folder holds a finished evaluation; ProcessError with the end of the output if
        lm-eval fails.
    """
    if os.path.lexists(folder / MANIFEST):
        raise UsageError(f"{folder} holds a finished evaluation: name a new folder with --output")
    words = command_line(backend, suite, settings, folder)
    log, failure = folder / "lm-eval.log", folder / "failure.txt"
    failure.unlink(missing_ok=True)
    progress.note(f"output of lm-eval: {log}")
    with (
        progress.step(f"evaluating {backend.name} with lm-eval"),
        log.open("w", encoding="utf-8") as output,
    ):
        # Relative paths of arguments are those of this process. Its folder must not hide packages.
        variables = os.environ | {"PYTHONSAFEPATH": "1", FAILURE_FILE: str(failure.resolve())}
        if backend.is_local and all(map(is_local, suite.tasks)):
            variables["HF_HUB_OFFLINE"] = "1"
        done = subprocess.run(words, stdout=output, stderr=output, check=False, env=variables)
    if done.returncode and failure.is_file():
        raise ProcessError(f"lm-eval failed: {read_text(failure, _MAX_BYTES)}; log: {log}")
    if done.returncode:
        raise ProcessError.died("lm-eval", done.returncode, log)
    for results in folder.rglob("results_*.json"):
        _hide_secrets(results)
    recorded = suite.recorded if suite.name else None
    write_manifest(folder, {backend.name: find_results(folder)[-1]}, recorded)


def _hide_secrets(results: Path) -> None:
    """Hide secrets in the model arguments that lm-eval writes into its results."""
    content = read_json_object(results)
    config = content.get("config") or {}
    arguments = config.get("model_args")
    if isinstance(arguments, str):
        config["model_args"] = redact([arguments])[0]
    elif isinstance(arguments, dict):
        for name, value in arguments.items():
            (shown,) = redact([f"{name}={value}"])
            if shown != f"{name}={value}":
                arguments[name] = shown.partition("=")[2]
    write_whole(results, json.dumps(content, indent=2, ensure_ascii=False))


def _task_files(folder: Path) -> Path:
    return folder / "task-files"


def _task_name(task: str, folder: Path) -> str:
    """Return lm-eval's name of a task, after writing its task file if it has one."""
    config = load_task(task, _task_files(folder) / "documents")
    _task_files(folder).mkdir(parents=True, exist_ok=True)
    if isinstance(config, str):
        return config
    name = str(config["task"])
    (_task_files(folder) / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return name


def parse_pairs(option: str, form: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Parse the values of a repeatable option. Raises: UsageError, with the form of its help, such as KEY=VALUE."""
    for text in texts:
        if not all(text.partition("=")):
            raise UsageError(f"--{option} {text}: expected {form}")
    return [(name, value) for name, _, value in (text.partition("=") for text in texts)]


def parse_mapping(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of a repeatable option, one for each name. Raises: UsageError."""
    mapping: dict[str, str] = {}
    for name, value in parse_pairs(option, form, texts):
        if name in mapping:
            raise UsageError(f"--{option} {name} is given twice")
        mapping[name] = value
    return mapping


_BATCH_SIZES = re.compile(r"[1-9]\d*|auto(:[1-9]\d*)?")


def parse_batch_size(text: str | None) -> str | None:
    """Return the value of --batch-size. Raises: UsageError unless lm-eval understands it."""
    if text is not None and not _BATCH_SIZES.fullmatch(text):
        raise UsageError(f"--batch-size {text}: expected a number above 0, or auto")
    return text


def parse_backend(
    name: str | None, arguments: list[str], processes: int, remote_code: RemoteCode = "refuse"
) -> Backend | None:
    """Parse the options of a backend; return None without --model-backend.

    Raises: UsageError for options that need a backend, arguments that are not KEY=VALUE, or a model
        folder that does not exist.
    """
    if name is None:
        if arguments or processes > 1:
            raise UsageError(
                "--model-args and --processes need --model-backend, such as --model-backend hf"
            )
        return None
    pairs = parse_mapping("model-args", "KEY=VALUE", arguments)
    if "batch_size" in pairs:
        raise UsageError(
            f"--model-args batch_size={pairs['batch_size']}: --batch-size sets the batch size"
        )
    for key in _MODEL_KEYS:
        if key in pairs:
            resolve_model(pairs[key])
    if processes > 1 and pairs.get("device", "").startswith("cpu"):
        raise UsageError(
            "--processes needs accelerators: on a CPU, `accelerate launch` always starts one process"
        )
    return Backend(name, pairs, processes, remote_code)
