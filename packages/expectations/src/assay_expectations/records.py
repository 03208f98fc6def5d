"""Expectation files: their records, reader and writer; and the requests to the process that runs models.

The key has the machine and content that must be equal before numbers are compared. Versions of software are
not part of it: the yardstick does not depend on them, and an expectation exists to show the effect of a new
version. Outputs are compressed distributions for every generated token. A model that does not generate has
distributions at some positions of its inputs instead. Imports no torch.
Shapes, by batch: B rows, N tokens (can differ between rows), K kept ids, M projections.
"""

import json
import re
import shlex
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, Self

import xxhash
from pydantic import ConfigDict, Field

from assay.errors import assay_command
from assay.files import (
    DiskError,
    UnreadableFileError,
    parse_json,
    read_text,
    require_numbers,
    validate_record,
    write_whole,
)
from assay.judge.coverage import Usage
from assay.models.weight_files import LFS_POINTER, StoredWeight
from assay.statistics import Statistic
from assay.verdicts import NextStep, Number, Record

# Of one batch, (B, N, K + 1). The last value of a token covers all other ids together.
LogProbabilities = list[list[list[Number]]]

# Of one batch, (B, N, M).
Projections = list[list[list[Number]]]

SCHEMA = 2

_WIDTH = 100


class PublishedRecord(Record):
    """Base of the records in the published JSON Schema, which takes descriptions from docstrings."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Machine(PublishedRecord):
    """The hardware part of the key."""

    model_config = ConfigDict(frozen=True)

    vendor: str
    architecture: str
    """The target of the kernels.

    For a host processor, only its instruction set: vector extensions change the order of sums, and the
    limits hold for any order.
    """
    dtype: str
    precision: str
    """Format to which operands of matrix products are rounded."""


class Settings(PublishedRecord):
    """Settings of the run."""

    num_prompts: int = 4
    batch_size: int = 4
    max_new_tokens: int = 16
    seed: int = 0
    top_k: int = 8
    attention: str = "default"
    prompt_length: str | None = None
    """As for `--prompt-length`. Absent from older files, like `chat`."""
    chat: bool = False

    def options(self, *names: str) -> dict[str, object]:
        """Return those of the settings `names` that are not the usual ones, as options of a command."""
        usual = Settings()
        return {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(usual, name)
        }


class Weight(PublishedRecord):
    """A tensor of the checkpoint."""

    dtype: str
    """As in safetensors: "BF16"."""
    shape: list[int]
    hash: str
    """Hash of values, dtype and shape."""

    @classmethod
    def of(cls, stored: StoredWeight) -> "Weight":
        """Convert a tensor of a loaded checkpoint."""
        return cls(dtype=stored.dtype, shape=list(stored.shape), hash=stored.hash)


class Content(PublishedRecord):
    """The model and its inputs."""

    tokenizer_hash: str
    tokenizer: dict[str, str] = Field(default_factory=dict)
    """Hash of each part of the tokenizer's files. Older files have none."""
    prompts_hash: str
    """Of all inputs, padding included."""
    unpadded_hash: str = ""
    """Of all inputs without padding. Older files have none."""
    settings: Settings
    weights: dict[str, Weight]


class Key(PublishedRecord):
    """The key of an expectation."""

    machine: Machine
    content: Content


class Distributions(PublishedRecord):
    """Distributions over the vocabulary for each generated token of one run, by batch.

    Of a model without logits, its outputs stand for the log-probabilities: rows of tokens or of texts, with the
    largest values of a row for its likely ids.
    """

    log_probabilities: list[LogProbabilities]
    """Of the kept ids, and of all others together."""
    projections: list[Projections]
    """Of all log-probabilities. They detect errors outside of the kept ids and in their order."""


class Signature(PublishedRecord):
    """Distributions of the yardstick and of the captured run."""

    tokens: list[list[list[int]]]
    """Tokens that the yardstick chose and that every run is forced to follow.

    (B, N) by batch; (B, 0) for a model that does not generate.
    """
    top_ids: list[list[list[list[int]]]]
    """Kept ids: the yardstick's most likely ids in their order, (B, N, K) by batch."""
    spreads: list[list[list[Number]]]
    """Standard deviation of the yardstick's log-probabilities over the vocabulary, (B, N) by batch."""
    yardstick: Distributions
    """In the highest precision."""
    captured: Distributions
    """Its distance from the yardstick is the noise."""
    outputs: list[str] = Field(default_factory=list)
    """Names of the outputs of a model without logits over the vocabulary; empty for logits."""


class Observed(PublishedRecord):
    """Distributions of a run that is judged by a signature."""

    distributions: Distributions
    dtype: str
    """The dtype of most parameters."""
    torch_settings: dict[str, Any] = Field(default_factory=dict)
    """As in `Provenance`."""


class Provenance(PublishedRecord):
    """Device, software and command of a capture, and its approval."""

    run: str
    """DEVICE/DTYPE."""
    product: str
    """Product name of the device."""
    versions: dict[str, str]
    """Versions of software that numbers depend on."""
    torch_settings: dict[str, Any]
    """Settings that decide if two runs are bitwise equal, such as the number of threads."""
    yardstick_dtype: Literal["float64", "float32"] = "float64"
    """Dtype of the yardstick; older files, which lack it, are of small models."""
    container: str | None = None
    """Image digest from ASSAY_CONTAINER."""
    process: dict[str, Any] = Field(default_factory=dict)
    """Date, arguments, commit, processor, variables, and versions of all packages."""
    approved_by: str | None = None
    reason: str | None = None


def versions_of_encoding() -> dict[str, str]:
    """Return the versions of the packages that make token ids of texts."""
    return {name: version(name) for name in ("tokenizers", "jinja2")}


class Expectation(PublishedRecord):
    """The content of an expectation file."""

    schema_: int = Field(default=SCHEMA, alias="schema", ge=SCHEMA, le=SCHEMA)
    model: str
    key: Key
    captures: list[dict[Statistic, Number]] = Field(min_length=1)
    """Noise ratios of each capture. Those of the first, whose values are stored, are 1."""
    limits: dict[Statistic, float]
    """Limits of the noise ratios."""
    limits_origin: str
    signature: Signature
    layers: dict[str, Number] = Field(default_factory=dict)
    """Relative error of each module's input and result in the worst call, including inherited errors.

    In the order in which they exist first. Older files have none, as of the fields below, or no inputs.
    """
    exact_layers: dict[str, list[Number]] = Field(default_factory=dict)
    """Projections of inputs and results of modules, in older files the first ones, after their number of rows."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Values of config.json and generation_config.json, by file and key."""
    prompts: list[list[int]] = Field(default_factory=list)
    """Token ids of the user's own prompts; empty for built-in ones."""
    chats: list[list[dict[str, str]]] = Field(default_factory=list)
    """Messages of each own prompt, [] for one of token ids; empty without `--chat`."""
    inputs: list[list[int]] = Field(default_factory=list)
    """Token ids of the built-in prompts. With another tokenizer, they still run."""
    provenance: Provenance
    hash: str = ""
    """Hash of all fields except itself and `provenance`, which detects manual changes."""

    @property
    def name(self) -> str:
        """Return the file name, without its suffix."""
        machine = self.key.machine
        rounded = "" if machine.precision == machine.dtype else f"-{machine.precision}"
        model = Path(self.model).name if Path(self.model).is_absolute() else self.model
        parts = (part.strip(".") for part in re.split(r"[^\w.-]+", model))
        model = "-".join(part for part in parts if part)
        return f"{machine.vendor}-{machine.architecture}-{machine.dtype}{rounded}-{model}"

    def options_of_check(self, file: Path | str) -> dict[str, object]:
        """Return the options of `assay check generate` that run the recorded inputs. file: of this expectation."""
        settings = self.key.content.settings
        if not self.prompts:
            return settings.options("prompt_length", "batch_size", "max_new_tokens", "seed")
        given: dict[str, object] = {"prompts": str(file), "max_new_tokens": settings.max_new_tokens}
        return given | settings.options("batch_size")

    def options_of_capture(self, file: Path | str) -> dict[str, object]:
        """Return the options of another capture that repeat the recorded inputs. file: of this expectation."""
        return {"prompts": str(file)} if self.options_of_check(file) else {}

    def content_hash(self) -> str:
        """Compute the value that `hash` must have."""
        text = self.model_dump_json(
            exclude=self._absent() | {"provenance": True, "hash": True}, by_alias=True
        )
        return xxhash.xxh3_128_hexdigest(text.encode())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return self.model_dump(mode="json", exclude=self._absent(), by_alias=True)

    def _absent(self) -> dict[str, Any]:
        """Return the fields that files do not hold, because older ones have none."""
        content = self.key.content
        absent: dict[str, Any] = {
            name: True
            for name in ("layers", "exact_layers", "config", "prompts", "chats", "inputs")
            if not getattr(self, name)
        }
        settings = {
            name: True for name in ("prompt_length", "chat") if not getattr(content.settings, name)
        }
        newer = {
            name: True for name in ("unpadded_hash", "tokenizer") if not getattr(content, name)
        }
        inner = {"settings": settings} | newer
        if not self.signature.outputs:
            absent["signature"] = {"outputs": True}
        return absent | {"key": {"content": inner}}


def value_of(module: str, port: str, number: int) -> str:
    """Return the name of a module's value in `Expectation.layers`: "a", "a (input)", "a (output 2)"."""
    kind = port if number == 1 else f"{port or 'output'} {number}"
    return f"{module} ({kind})" if kind else module


def place_of(name: str, names: Container[str]) -> str:
    """Return the module whose own code makes a value of `Expectation.layers`: of an input, a caller's.

    names: all names there.
    """
    module, _, kind = name.partition(" (")
    if not kind.startswith("input"):
        return module
    while module:
        module = module.rpartition(".")[0]
        if module in names:
            return module
    return ""


def file_for(expectation: Expectation, output: Path) -> Path:
    """Return `output` if it is a file, or the file in the folder `output` that the key names."""
    return output if output.suffix == ".json" else output / f"{expectation.name}.json"


def require_writable(output: Path) -> None:
    """Raise DiskError early if a file cannot be written to `output`."""
    folder = output.parent if output.suffix == ".json" else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError.refused(folder, error) from error


def write_expectation(expectation: Expectation, output: Path) -> Path:
    """Write an expectation to a file or folder. Returns: the file. Raises: DiskError."""
    sealed = expectation.model_copy(update={"hash": expectation.content_hash()})
    path = file_for(expectation, output)
    record = sealed.to_json()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError.refused(path.parent, error) from error
    return write_whole(path, _as_lines(record, "") + "\n")


class BrokenExpectationError(UnreadableFileError):
    """An expectation that cannot be used."""

    problem: str = ""
    next_steps: Sequence[NextStep] = ()

    @classmethod
    def explained(cls, path: Path | str, problem: str, *steps: NextStep) -> Self:
        """Make the error of the file `path`, with the steps that go on."""
        error = cls(f"{path}: {problem}. To go on, {list_steps(*steps)}")
        error.problem, error.next_steps = problem, steps
        return error


def read_expectation(path: Path) -> Expectation:
    """Read the expectation in `path`. Raises: BrokenExpectationError."""
    try:
        text = read_text(path)
    except UnreadableFileError as error:
        raise BrokenExpectationError.explained(
            path, _without_path(error, path), _restore(path)
        ) from None
    return parse_expectation(text, path)


def parse_expectation(text: str, path: Path | str, file: str = "") -> Expectation:
    """Read an expectation from the text of `path`. Raises: BrokenExpectationError.

    file: the file that a new capture would replace, if `path` is a version in git or a pipe.
    """
    if text.startswith(LFS_POINTER):
        problem = "it is a pointer of Git LFS, not the file itself"
        step = NextStep("fetch it", "git lfs pull")
        raise BrokenExpectationError.explained(path, problem, step)
    place = shlex.quote(str(path))
    if (conflict := re.search(r"^<{7} .*$", text, re.MULTILINE)) is not None:
        line = text.count("\n", 0, conflict.start()) + 1
        raise BrokenExpectationError.explained(
            path,
            f"it has a conflict marker of git in line {line}",
            NextStep("take one side, then verify it", f"git checkout --ours {place}"),
            NextStep("or the other side", f"git checkout --theirs {place}"),
        )
    record: Any = None
    try:
        if not text.strip():
            raise UnreadableFileError.of(path, "it is empty")
        record = parse_json(text, path)
        return _validate(record, path)
    except UnreadableFileError as error:
        if record is not None and not (isinstance(record, dict) and "schema" in record):
            raise BrokenExpectationError.explained(
                path,
                "it is not an expectation",
                NextStep("move it out of the folder of expectations", f"mv {place} ."),
            ) from None
        renewal = _renewal(record if isinstance(record, dict) else {}, file or path)
        is_old = isinstance(record, dict) and record.get("schema") != SCHEMA  # git has no newer one
        steps = [] if file or is_old else [_restore(path)]
        raise BrokenExpectationError.explained(
            path,
            _without_path(error, path),
            *steps,
            NextStep("capture it again", renewal),
        ) from None


def step_to_verify(file: str, run: str, here: "AllSeen") -> NextStep:
    """Return the step after a change that is not intended."""
    options = {"run": run, "model": here.model, "candidate_setup": here.setup}
    verify = assay_command("expect", "verify", file, **options)
    return NextStep("restore the model's files, then", verify)


def _restore(path: Path | str) -> NextStep:
    return NextStep("restore it", f"git checkout {shlex.quote(str(path))}")


def _validate(record: object, path: Path | str) -> Expectation:
    if not isinstance(record, dict):
        raise UnreadableFileError.of(path, "not a JSON object")
    if (schema := record.get("schema")) != SCHEMA:
        raise UnreadableFileError.of(
            path, f"its schema is {schema!r}, but this assay reads schema {SCHEMA}"
        )
    expectation = require_numbers(validate_record(Expectation, record, path), path)
    if expectation.hash != expectation.content_hash():
        raise UnreadableFileError.of(
            path, "its hash does not match its content, which was edited or merged"
        )
    return expectation


def _without_path(error: UnreadableFileError, path: Path | str) -> str:
    return str(error).removeprefix(str(path)).lstrip(":, ")


def _renewal(record: Mapping[str, Any], file: Path | str) -> str:
    """Return the command that captures the expectation of a refused file again."""
    origin = record.get("provenance")
    run = origin.get("run") if isinstance(origin, dict) else None
    model = record.get("model")
    return recapture_command(
        model if isinstance(model, str) else "MODEL", run if isinstance(run, str) else "RUN", file
    )


def list_steps(*steps: NextStep) -> str:
    """Format the next steps for a message."""
    return "\n".join(map(str, steps))


def recapture_command(model: str, run: str, file: Path | str) -> str:
    """Return the command that replaces an expectation by the outputs of today."""
    return assay_command("expect", "capture", model, run=run, output=file, reason="TEXT")


def _as_lines(value: Any, indent: str) -> str:  # noqa: ANN401 - any JSON value
    """Format JSON with one line per list, and per object that fits into a line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or len(indent) + len(line) <= _WIDTH:
        return line
    inner = indent + " "
    items = [f"{inner}{json.dumps(name)}: {_as_lines(item, inner)}" for name, item in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


class CaptureOptions(Record):
    """Options of a capture, and the request to its first process."""

    model: str
    run: str
    num_captures: int = 3
    """Number of processes that capture, one after the other."""
    settings: Settings = Field(default_factory=Settings)
    prompts: list[list[int]] | str | None = None
    """Token ids, or a file of prompts; None for built-in ones."""
    chats: list[list[dict[str, str]]] = Field(default_factory=list)
    """As in `Expectation`, of prompts that were token ids there."""
    repeats: str | None = None
    """The file of the expectation whose inputs these are; None for other inputs."""
    approved_by: str | None = None
    reason: str | None = None


class Captured(Record):
    """The answer to `CaptureOptions`."""

    expectation: Expectation
    """Of this capture alone, without `process` in its provenance."""
    on_host: Distributions | None
    """Outputs of the host in the same dtype; None if the host was captured."""


class VerifyRequest(Record):
    """A request to observe the models of expectation files on a device."""

    files: list[str]
    run: str
    setup: str | None = None
    model: str | None = None
    """Folder or name to load instead of the recorded one."""


class Exact(Record):
    """Outputs of the yardstick in this environment."""

    yardstick: Distributions
    exact_layers: dict[str, list[Number]] = Field(default_factory=dict)


class Reference(Exact):
    """Outputs of this environment without the setup function, to explain an observation.

    Of a run within the limits, only the yardstick, unless it moved.
    """

    yardstick_dtype: Literal["float64", "float32"]
    layers: dict[str, Number] = Field(default_factory=dict)
    """Errors of the modules of a run over a limit."""
    on_host: Distributions | None = None
    """Outputs of the host in the same dtype; None if they are those that were observed, or within the limits."""
    restored: Exact | None = None
    """The yardstick with the recorded config.json; None if it has not changed, or cannot be restored."""


class ReferenceRequest(Record):
    """A request for the references of observations."""

    run: str
    model: str | None
    is_patched: bool
    """True if a setup function changed the observed models."""
    sketches: dict[str, Any]
    """Those of `Seen`, by file."""


class Seen(Record):
    """The observation of one expectation file."""

    file: str
    model: str | None = None
    """The model that was loaded, maybe found in a folder around the file; None if it was not."""
    observed: Observed | None = None
    """Outputs of the model here; None if it did not run."""
    has_other_prompts: bool = False
    """True if the tokenizer of today makes other token ids of the built-in prompts."""
    usage: Usage | None = None
    """Parts of the model that ran."""
    stale: list[str] = Field(default_factory=list)
    """Differences in content, which make the expectation stale."""
    changed_modules: list[str] = Field(default_factory=list)
    """Modules that hold other weights than at the capture."""
    config: list[str] = Field(default_factory=list)
    """Changes of config.json and generation_config.json."""
    sketches: Any = None
    """Projections of each module, arrays by name; empty for an observation within the limits. None: no reference."""
    reference: Reference | None = None
    exact_left_out: str | None = None
    """Reason why an observation within the limits has no reference."""
    setup_effect: Exact | str | None = None
    """Outputs of the yardstick after the setup function; or the reason why they are unknown."""
    problem: str | None = None
    """Reason why the model could not run."""
    has_recorded_files: bool = False
    """True if a model that could not run has the weights, tokenizer and settings of the capture."""
    missing: str | None = None
    """Reason why the model is absent or cannot be read; None if it was loaded."""


class AllSeen(Record):
    """The answer to a `VerifyRequest`."""

    machine: Machine
    versions: dict[str, str]
    cpu: str | None = None
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that numbers can depend on."""
    setup: str | None = None
    """The setup function of the request."""
    model: str | None = None
    """The model of the request."""
    seen: list[Seen]

    def model_of(self, expectation: Expectation) -> str:
        """Return the model that was verified by `expectation`: the one of the request, or the recorded one."""
        return self.model or expectation.model
