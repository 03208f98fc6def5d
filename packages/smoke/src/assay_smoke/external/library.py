"""The TOML file of a training library: its launch line and its expected behavior.

docs/smoke-commands.md lists every key.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from assay.errors import UsageError, suggest
from assay.files import UnreadableFileError, read_toml_record
from assay.models.sources import resolve_model
from assay.verdicts import Record

# Before the path of a file, among names of cases.
COMMAND = "command:"

# Placeholders of a launch line. `resume` also has `resume_from`, and `checkpoints.folder` has `step`.
PLACEHOLDERS = frozenset(
    {
        "python", "model", "data", "output", "steps", "save_every", "saves", "keep", "seed", "ranks",
        "device", "cards", "port", "batch_size", "accumulation",
    }
)  # fmt: skip
# Placeholders that state how the rows of a step are split.
_SPLIT = ("ranks", "accumulation", "batch_size")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w-]*)\}")

# A word of a launch line that is a program's source, not an option or another program's text.
_SCRIPT = re.compile(r"[^\s{}=-][^\s{}=]*\.(py|sh)")

# One to resume from, and the last.
_FEWEST_CHECKPOINTS = 2

# The log has one line per step, and all are read and compared.
_MOST_STEPS = 1_000_000


def _split(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


Words = Annotated[list[str], BeforeValidator(_split)]
Int = Annotated[int, Strict()]  # no string of digits


class Losses(Record):
    """Where losses are logged: in output that matches `pattern`, or in lines of a JSON file."""

    pattern: str | None = Field(
        None, description=r"a regular expression with a group `loss`, such as 'loss (?P<loss>\S+)'"
    )
    file: str | None = Field(None, description="a file with one JSON object per line")
    step: str = Field("step", description="the name of the step's number in `losses.file`")
    loss: str = Field("loss", description="the name of the loss in `losses.file`")
    learning_rate: str | None = Field(
        None,
        description="the name of the learning rate in `losses.file`, by default learning_rate or lr",
    )
    grad_norm: str = Field(
        "grad_norm", description="the name of the gradient's norm in `losses.file`"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pattern is None) == (self.file is None):
            raise ValueError("give either `pattern` or `file`")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groupindex
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"`pattern` is not a regular expression: {error}") from None
            if "loss" not in groups:
                raise ValueError(
                    "`pattern` has no group `loss`: write (?P<loss>...) around the loss"
                )
        return self


class Checkpoints(Record):
    """Where checkpoints are written, and their kind."""

    folder: str = Field(description="a path with {output} and {step}, such as {output}/step-{step}")
    model: str = Field(".", description="the folder of the model or adapter within a checkpoint")
    kind: Literal["hugging-face", "adapter"] = Field(
        "hugging-face", description="hugging-face or adapter"
    )
    numbers: tuple[int, int] | None = Field(
        None,
        description="the value of {step} for the first checkpoint and its increment, such as [0, 1]",
    )
    state: str | None = Field(
        None, description="a path with {step}, for parts of a checkpoint in another place"
    )
    state_numbers: tuple[int, int] | None = Field(None, description="as `numbers`, for `state`")

    @model_validator(mode="after")
    def _check(self) -> Self:
        paths = {"folder": self.folder, "state": self.state}
        for key, path in paths.items():
            if path is not None and "{step}" not in path:
                raise ValueError(f"`{key}` has no {{step}}")
            _require_known([path or ""], PLACEHOLDERS | {"step"}, f"checkpoints.{key}")
        for key, numbers in (("numbers", self.numbers), ("state_numbers", self.state_numbers)):
            if numbers is not None and numbers[1] < 1:
                raise ValueError(f"the second number of `{key}` is below 1: it is an increment")
        return self


class ExternalLibrary(Record):
    """A training library. Error messages quote the descriptions."""

    name: str = Field("", description="a name for reports")
    launch: Words = Field(
        description="the command line that trains, as a list or one string", min_length=1
    )
    resume: Words = Field(description="arguments to append for a resume, with {resume_from}")
    resume_in: Literal["new-folder", "copy"] = Field(
        "new-folder",
        description="new-folder, or copy: a copy of the output without later checkpoints",
    )
    equivalent: Words | None = Field(
        None, description="a launch line that splits the rows of a step another way; [] for none"
    )
    losses: Losses = Field(description="a table with `pattern` or `file`")
    checkpoints: Checkpoints = Field(description="a table with `folder`")
    model: str = Field("micro:llama", description="a Hugging Face folder, hub name or micro:RECIPE")
    data: str | None = Field(None, description="a file or folder, for {data}")
    steps: Int = Field(9, description="the number of optimizer steps", ge=2, le=_MOST_STEPS)
    save_every: Int = Field(3, description="the number of steps between checkpoints", ge=1)
    learning_rates: list[float] | None = Field(
        None, description="the learning rate that is logged in each step, from the first on"
    )
    keep: Int | None = Field(
        None, description="the number of checkpoints that the library keeps, 2 or more", ge=2
    )
    frozen: list[str] = Field(
        default_factory=list, description="patterns of parameters that do not train"
    )
    on_sigterm: Literal["nothing", "checkpoint"] = Field(
        "nothing", description="nothing, or checkpoint: the library saves one before it ends"
    )
    sigterm_to: Literal["launcher", "all"] = Field(
        "launcher", description="launcher, or all: the launcher and every process that it started"
    )
    seed: Int = 0
    ranks: Int = Field(1, description="a number of processes", ge=1)
    batch_size: Int = Field(2, description="rows of a micro-batch on one rank", ge=1)
    accumulation: Int = Field(2, description="micro-batches of a step on one rank", ge=1)
    precision: Literal["float32", "tf32", "float16", "bfloat16"] | None = Field(
        None, description="the narrowest format in which the library computes"
    )
    device: str = Field("cpu", description="a device, as in `assay devices`")
    cards: Int = Field(0, description="the number of cards of `device` that are needed", ge=0)
    ports: list[int] = Field(default_factory=list, description="fixed ports of the launch line")
    environment: dict[str, str] = Field(default_factory=dict, description="variables, all strings")
    install: str | None = Field(
        None, description="the command that installs the library: pip install ..."
    )
    leftovers_allowed: list[str] = Field(
        default_factory=list, description="patterns of temporary files that may stay"
    )
    time_limit_seconds: float = Field(600.0, description="a limit for each run", gt=0)
    end_limit_seconds: float = Field(
        120.0, description="a limit from the last step to the end of the process", gt=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_known(self.launch, PLACEHOLDERS, "launch")
        _require_known(self.equivalent or [], PLACEHOLDERS, "equivalent")
        _require_known(self.resume, PLACEHOLDERS | {"resume_from"}, "resume")
        if not any("{resume_from}" in word for word in self.resume) and self.resume_in != "copy":
            raise ValueError(
                "`resume` has no {resume_from}; a library that looks for checkpoints in its output"
                ' needs resume_in = "copy"'
            )
        for key, words in (("launch", self.launch), ("equivalent", self.equivalent or [])):
            if self.data is None and any("{data}" in word for word in words):
                raise ValueError(f"`{key}` has {{data}}, but there is no key `data`")
        if self.frozen and self.checkpoints.kind == "adapter":
            raise ValueError('`frozen` has no effect on checkpoints.kind = "adapter": leave it out')
        self._check_steps()
        return self

    def _check_steps(self) -> None:
        if self.steps % self.save_every:
            raise ValueError(
                f"`steps` is {self.steps}, not a multiple of `save_every`, {self.save_every}: the end"
                " of training needs a checkpoint"
            )
        if len(self.kept_steps) < _FEWEST_CHECKPOINTS:
            raise ValueError(
                f"{self.steps} `steps` with `save_every` {self.save_every} leave one checkpoint; two"
                " are needed: one to resume from, and the last"
            )
        if self.keep is not None and len(self.saved_steps) <= self.keep:
            raise ValueError(
                f"`keep` is {self.keep}, but only {len(self.saved_steps)} checkpoints are written: the"
                " library would have none to delete"
            )
        if self.learning_rates is None:
            return
        if len(self.learning_rates) != self.steps:
            raise ValueError(
                f"`learning_rates` has {len(self.learning_rates)} numbers for {self.steps}"
                " `steps`: each step needs one"
            )
        if self.losses.pattern and "lr" not in re.compile(self.losses.pattern).groupindex:
            raise ValueError(
                "`learning_rates` needs a group `lr` in losses.pattern: write (?P<lr>...) around"
                " the logged rate"
            )

    @property
    def split(self) -> dict[str, int]:
        """Return how the launch line splits the rows of a step, derived from its placeholders."""
        line = " ".join(self.launch)
        return {name: getattr(self, name) for name in _SPLIT if f"{{{name}}}" in line}

    def split_otherwise(self) -> "ExternalLibrary | None":
        """Return the library launched with the same rows in each step, split another way.

        By default all rows of a step form one micro-batch on one rank. If they already do, each row becomes
        a micro-batch. Return None if no launch line is declared or derivable.
        """
        if self.equivalent is not None:
            return self.model_copy(update={"launch": self.equivalent}) if self.equivalent else None
        num_parts = math.prod(self.split.values())
        for name in ("batch_size", "accumulation"):
            other = dict.fromkeys(self.split, 1) | {name: num_parts}
            if other != self.split and other.keys() == self.split.keys():
                return self.model_copy(update=other)
        return None

    @property
    def data_path(self) -> Path:
        """Return the absolute path of `data`, which is relative to the working folder, as `model` is."""
        return Path(self.data or "").expanduser().resolve()

    @property
    def saved_steps(self) -> list[int]:
        """Return the steps after which checkpoints are written."""
        return list(range(self.save_every, self.steps + 1, self.save_every))

    @property
    def kept_steps(self) -> list[int]:
        """Return the steps of the checkpoints that remain at the end."""
        return self.saved_steps if self.keep is None else self.saved_steps[-self.keep :]

    @property
    def resume_at(self) -> int:
        """Return the step of the middle checkpoint."""
        return self.kept_steps[(len(self.kept_steps) - 1) // 2]

    def step_of(self, number: int, numbers: tuple[int, int] | None) -> int | None:
        """Return the steps before the checkpoint whose {step} is `number`; None if not a whole number.

        numbers: `numbers` or `state_numbers` of the checkpoints.
        """
        first, per_save = numbers or (self.save_every, self.save_every)
        saves = self.save_every * (number - first)
        return None if saves % per_save else self.save_every + saves // per_save


def find_files(names: Iterable[str]) -> list[Path]:
    """Return the files among names of cases and of files."""
    files = (name.removeprefix(COMMAND) for name in names if name.startswith(COMMAND))
    return [Path(file).expanduser() for file in files]


def read_library(path: Path) -> ExternalLibrary:
    """Read a TOML file.

    Raises: UnreadableFileError with the wrong key and the expected value.
    """
    library = read_toml_record(ExternalLibrary, path)
    return library if library.name else library.model_copy(update={"name": path.stem})


def require_files(library: ExternalLibrary, toml: Path) -> None:
    """Require the model, the data, and the scripts of the launch lines.

    Scripts are relative to the folder of `toml`, `model` and `data` to the working folder.
    Raises: UsageError.
    """
    lines = {"launch": library.launch, "equivalent": library.equivalent or []}
    for key, word in ((key, word) for key, words in lines.items() for word in words):
        script = toml.resolve().parent / word
        if _SCRIPT.fullmatch(word) and not script.is_file():
            others = [one.name for one in script.parent.glob(f"*{script.suffix}")]
            near = get_close_matches(script.name, others, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UnreadableFileError(f"{toml}: {key}: {script} does not exist{meant}")
    if library.data is not None and not (data := library.data_path).exists():
        raise UnreadableFileError(f"{toml}: data: {data} does not exist")
    try:
        resolve_model(library.model)
    except UsageError as error:
        raise UnreadableFileError(f"{toml}: {error}") from None


def fill(text: str, values: Mapping[str, object]) -> str:
    """Replace the placeholders of `text`. Other braces stay."""
    return _PLACEHOLDER.sub(
        lambda found: str(values[found[1]]) if found[1] in values else found[0], text
    )


def _require_known(words: list[str], known: frozenset[str], key: str) -> None:
    named = {name for word in words for name in _PLACEHOLDER.findall(word)}
    if unknown := sorted(named - known):
        raise ValueError(f"`{key}` has an {suggest('placeholder', unknown[0], sorted(known))}")
