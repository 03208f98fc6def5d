"""`assay.toml`: the machines of a repository, and the commands of assay that check it.

Every entry of a tier becomes one command. Its keys are the options of that command, so a new option
needs no change here.
"""

import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from assay.devices.registry import adapter_names
from assay.devices.run_string import RUN_DTYPES, Run, parse_device, parse_run, suggest_device
from assay.errors import UsageError, suggest
from assay.files import UnreadableFileError, read_text, read_toml, read_toml_record
from assay.plugins import list_defined_names

FILE = "assay.toml"

Tier = Literal["check", "smoke", "expectations", "bench"]
TIERS: tuple[Tier, ...] = ("check", "smoke", "expectations", "bench")

NAME = r"[a-z0-9][a-z0-9-]*"
# The labels of runners that GitHub hosts: https://docs.github.com/en/actions/reference/runners/github-hosted-runners
_HOSTED = re.compile(r"(ubuntu|windows|macos)-[\w.-]+")


def _require_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ValueError("it must consist of small letters, digits and dashes")
    return name


def _require_option(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 - of pydantic
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("it must be a text, a number, true, or a list of texts") from None


# The value of a key in an entry: an option, a repeated option, or a flag.
Value = str | int | float | bool | list[str]
Entry = dict[str, Annotated[Value, WrapValidator(_require_option)]]
_Name = Annotated[str, AfterValidator(_require_name)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Table):
    """A runner of the repository's CI, by the name that labels use."""

    runs_on: tuple[str, ...] = Field((), alias="runs-on")
    """The labels by which GitHub finds the runner. Without any, no event of GitHub starts its jobs."""
    run: str
    """The device and dtype to judge."""
    cards: int | None = Field(None, ge=1, strict=True)
    """The number of devices that cases of smoke may use. Default: all."""
    start: Literal["label", "commit"] = "label"
    """The trigger of its jobs: a label, or every commit of a pull request and of the default branch."""
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1)] = ("check", "smoke", "expectations")
    minutes: int = Field(60, ge=1, le=360, strict=True)
    """The time limit of a job. GitHub ends every job after 360."""
    pip_index: str = Field("", alias="pip-index")
    """One more package index, as that of torch's builds for the machine."""

    @model_validator(mode="after")
    def _require_runner(self) -> Self:
        if self.start == "commit" and not self.runs_on:
            raise ValueError('start = "commit" needs runs-on: the labels of the runner on GitHub')
        own = [label for label in self.runs_on if not _HOSTED.fullmatch(label)]
        if self.start == "commit" and own:
            raise ValueError(
                f'start = "commit" would run unreviewed code on your own runner {own[0]!r}: it is for runners that'
                " GitHub hosts, such as ubuntu-24.04. Remove it; a label then starts the job"
            )
        return self


class Configuration(_Table):
    """The content of `assay.toml`."""

    label: _Name = "assay"
    """The part of a label before its colon: `assay:nvidia`."""
    install: tuple[str, ...] = ()
    """Arguments of `pip install` that give a job the repository's own packages."""
    machines: dict[_Name, Machine] = Field(min_length=1)
    load: tuple[Entry, ...] = ()
    generate: tuple[Entry, ...] = ()
    train: tuple[Entry, ...] = ()
    smoke: tuple[Entry, ...] = ()
    data: tuple[Entry, ...] = ()
    expectations: tuple[Entry, ...] = ()
    bench: tuple[Entry, ...] = ()

    def find(self, name: str) -> Machine:
        """Find a machine by its name. Raises: UsageError for an unknown name."""
        if name not in self.machines:
            raise UsageError(f"{FILE}: {suggest('machine', name, self.machines)}")
        return self.machines[name]

    def with_run(self, name: str, run: str) -> "Configuration":
        """Return the same with another device and dtype for a machine. Raises: UsageError."""
        machine = self.find(name).model_copy(update={"run": str(parse_known_run(run))})
        return self.model_copy(update={"machines": {**self.machines, name: machine}})


def parse_known_run(text: str) -> Run:
    """Parse a RUN. Raises: UsageError if assay has no such device."""
    run = parse_run(text)
    kind = parse_device(run.device).kind
    if kind not in adapter_names():
        other = suggest_device(kind)
        hint = (
            f"unknown device {kind!r}; {other}."
            if other
            else suggest("device", kind, adapter_names())
        )
        raise UsageError(f"{text}: {hint} `assay devices` lists those of each vendor")
    return run


@dataclass(frozen=True)
class Step:
    """One command of a job."""

    tier: Tier
    name: str
    """Unique in the job, and the name of its folder."""
    words: tuple[str, ...]
    """The words after `assay`, without `--output`."""
    entry: str = ""
    """The entry of `assay.toml` in words: "smoke, entry 2"."""
    earlier: str = ""
    """The step whose folder is the last argument; "" for none."""

    def words_in(self, folder: Path) -> tuple[str, ...]:
        """Return the words after `assay`, without `--output`, of a job that writes into `folder`."""
        return (*self.words, str(folder / self.earlier)) if self.earlier else self.words

    @property
    def command(self) -> str:
        """Return the command line, in which DIR is the folder of the job."""
        return shlex.join(("assay", *self.words_in(Path("DIR"))))


@dataclass(frozen=True)
class _Kind:
    """The command that an entry of one table becomes."""

    tier: Tier
    command: tuple[str, ...]
    positional: str = ""
    """The key that is the command's argument."""
    run_option: str = ""
    """The option that takes the machine's RUN."""
    distribution: str = "assay-core"


# A folder of the repository, or a name on the hub.
_FOLDER = re.compile(r"[\w.-]+(/[\w.-]+)+")
# The words before a path of the repository: of options, and of commands whose argument is one.
_BEFORE_PATHS = ("--golden", "verify", "compare")
# A folder that pip installs has one of these.
_PROJECTS = ("pyproject.toml", "setup.py")
_KINDS = {
    "load": _Kind("check", ("check", "load"), "model", "--run"),
    "generate": _Kind("check", ("check", "generate"), "model", "--candidate"),
    "train": _Kind("check", ("check", "train"), "model", "--candidate"),
    "smoke": _Kind("smoke", ("smoke", "run"), "case", "--device", "assay-smoke"),
    "data": _Kind("smoke", ("smoke", "data"), "model", "", "assay-smoke"),
    "expectations": _Kind("expectations", ("expect", "verify"), "folder", "--run", "assay-expectations"),
    "bench": _Kind("bench", ("bench", "run"), "", "--run", "assay-bench"),
}  # fmt: skip


def read_configuration(root: Path) -> Configuration:
    """Read the `assay.toml` of a repository. Raises: UsageError that names the key and its fault."""
    path = root / FILE
    if not path.is_file():
        raise UsageError(f"{root} has no {FILE}: `assay init` writes one")
    try:
        read = read_toml_record(Configuration, path)
    except UnreadableFileError as error:
        raise UsageError(str(error)) from None
    for name, machine in read.machines.items():
        try:
            parse_known_run(machine.run)
        except UsageError as error:
            raise UsageError(f"{path}: machines.{name}.run: {error}") from None
    return read


def list_steps(configuration: Configuration, name: str, tier: str = "") -> tuple[Step, ...]:
    """List the commands of a job on the machine `name`, tier by tier.

    tier: the one tier to run. "": those of the machine.
    Raises: UsageError for an unknown machine or tier, or a wrong entry.
    """
    machine = configuration.find(name)
    if tier and tier not in TIERS:
        raise UsageError(suggest("tier", tier, TIERS))
    tiers = (tier,) if tier else machine.tiers
    steps = [step for step in _steps(configuration, machine) if step.tier in tiers]
    return tuple(sorted(steps, key=lambda step: TIERS.index(step.tier)))


def list_distributions(steps: Iterable[Step]) -> list[str]:
    """List the packages of assay that these commands need."""
    by_command = {kind.command[0]: kind.distribution for kind in _KINDS.values()}
    return list(dict.fromkeys(["assay-core", *(by_command[step.words[0]] for step in steps)]))


def find_missing(steps: Iterable[Step], root: Path) -> list[str]:
    """Find what commands name and the repository does not have: files, folders, and names in FILE.py:NAME.

    A word is a path if it is FILE.py:NAME or command:FILE, or begins with a folder of the repository and is
    not a RUN. So are goldens, expectations and baselines.
    """
    found = (
        f"{step.entry}: {missing}"
        for step in steps
        for before, word in pairwise(step.words)
        if (missing := _missing_in(before, word, root))
    )
    return list(dict.fromkeys(found))  # several machines run the same entry


def describe_models(steps: Iterable[Step], root: Path) -> list[str]:
    """Name the models that a job does not find in a clone of the repository."""
    found = []
    named = ((step, model) for step in steps for model in _models_of(step, root))
    for step, model in named:
        if not _FOLDER.fullmatch(model):
            continue
        if not (root / model).exists():
            found.append(
                f"{step.entry}: the repository has no folder {model}: a job would load that name from the hub"
            )
        elif is_ignored(root, model):
            found.append(f"{step.entry}: git ignores {model}: a job would not have it")
    return list(dict.fromkeys(found))


def _models_of(step: Step, root: Path) -> list[str]:
    if step.words[0] == "check" or step.words[:2] == ("smoke", "data"):
        return list(step.words[2:3])
    tomls = [word for word in step.words if word.startswith("command:")]
    read = [read_toml(root / toml.removeprefix("command:")) for toml in tomls]
    return [str(one["model"]) for one in read if "model" in one]


def require_installable(configuration: Configuration, root: Path) -> None:
    """Raise UsageError if pip would not find the files that `install` names."""
    words = iter(configuration.install)
    for word in words:
        option, equals, path = word.partition("=")
        if option in ("-e", "--editable", "-r", "--requirement", "-c", "--constraint"):
            path = path if equals else next(words, "")
        elif word.startswith("."):
            path = word
        else:
            continue
        path = path.partition("[")[0]
        if "://" in path:
            continue
        problem = "" if path else f"{option} needs a value"
        if path and not (root / path).exists():
            problem = f"{path} does not exist"
        elif (
            path
            and (root / path).is_dir()
            and not any((root / path / name).is_file() for name in _PROJECTS)
        ):
            problem = f"{path} has no {' or '.join(_PROJECTS)}"
        if problem:
            raise UsageError(f"{FILE}: install: {problem}")


def list_uninstalled(configuration: Configuration, root: Path) -> list[str]:
    """List the projects of the repository that `install` names and this Python lacks."""
    folders = [word for word in configuration.install if (root / word / _PROJECTS[0]).is_file()]
    tables = [read_toml(root / one / _PROJECTS[0]).get("project", {}) for one in folders]
    names = [str(table["name"]) for table in tables if "name" in table]
    return [name for name in names if not [*distributions(name=name)]]


def is_ignored(root: Path, path: str) -> bool:
    """Return True if git ignores this path of the repository; False without git."""
    command = ["git", "-C", str(root), "check-ignore", "-q", "--", path]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _missing_in(before: str, word: str, root: Path) -> str:
    is_path = before in _BEFORE_PATHS
    path, name = word.removeprefix("command:"), ""
    if found := re.fullmatch(r"(.+\.py):(\w+)", word):
        path, name = found.groups()
    elif is_path and word.startswith(("/", "~", "-")):  # on the machine, or an option
        return ""
    elif path == word and not is_path:
        first, slash, rest = word.partition("/")
        if not slash or not first or rest in RUN_DTYPES or not (root / first).is_dir():
            return ""
    if not (root / path).exists():
        wanted = Path(path)
        siblings = {one.stem: one.name for one in (root / path).parent.glob(f"*{wanted.suffix}")}
        near = get_close_matches(wanted.stem, siblings, n=1)
        return f"{path}; did you mean {siblings[near[0]]}?" if near else path
    names = list_defined_names(read_text(root / path)) if name else None
    if names is None or name in names:
        return ""
    return f"{path}: {suggest('name', name, sorted(names))}"


def _steps(configuration: Configuration, machine: Machine) -> Iterator[Step]:
    for table, kind in _KINDS.items():
        entries: tuple[Entry, ...] = getattr(configuration, table)
        names = _names_of(table, kind, entries)
        for number, entry in enumerate(entries, start=1):
            where = f"{table}, entry {number}" if len(entries) > 1 else table
            name = names[number - 1]
            options = _with_defaults(table, kind, entry, machine, where)
            baseline = options.pop("baseline", None) if table == "bench" else None
            yield Step(kind.tier, name, (*kind.command, *_words_of(kind, options, where)), where)
            if baseline is not None:
                words = ("bench", "compare", str(baseline))
                yield Step(kind.tier, f"{name}-compare", words, where, earlier=name)


def _names_of(table: str, kind: _Kind, entries: Sequence[Entry]) -> list[str]:
    """Name the entries of a table: by what they check if that tells them apart, else by their numbers."""
    if len(entries) == 1:
        return [table]
    found = []
    for entry in entries:
        value = entry.get(kind.positional)
        path = Path(value.removeprefix("command:") if isinstance(value, str) else "")
        stem = path.parent.name if path.name == "smoke.toml" else path.stem
        found.append(f"{table}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem)}")
    if len(set(found)) == len(found) and f"{table}-" not in found:
        return found
    return [f"{table}-{number}" for number in range(1, len(entries) + 1)]


def _with_defaults(table: str, kind: _Kind, entry: Entry, machine: Machine, where: str) -> Entry:
    """Add what the machine decides to the options of an entry, which may choose the dtype."""
    run, options = parse_run(machine.run), dict(entry)
    if "device" in entry:
        raise UsageError(f"{FILE}: {where}: leave 'device' out: the machine decides it")
    chosen = [key for key in ("candidate", "run") if key in entry]
    for key in chosen:
        options[key] = str(Run(run.device, _require_dtype(entry[key], f"{where}: {key}")))
    option = kind.run_option.removeprefix("--")
    if option and not chosen:
        options[option] = run.device if option == "device" else machine.run
    if table in ("generate", "train") and not {"reference", "golden"} & set(options):
        options["reference"] = "cpu/float32"
    if table == "smoke" and machine.cards and "cards" not in options:
        options["cards"] = machine.cards
    return options


def _require_dtype(value: Value, where: str) -> str:
    if isinstance(value, str) and value in RUN_DTYPES:
        return value
    dtype = value.rpartition("/")[2] if isinstance(value, str) else ""
    advice = (
        f"write {dtype!r}" if dtype in RUN_DTYPES else f"write a dtype: {', '.join(RUN_DTYPES)}"
    )
    raise UsageError(f"{FILE}: {where} = {value!r}: the machine decides the device; {advice}")


def _words_of(kind: _Kind, options: Mapping[str, Value], where: str) -> Iterator[str]:
    """Write the options as words of a command line, its argument first."""
    if kind.positional in options:
        given = options[kind.positional]
        yield from [str(one) for one in given] if isinstance(given, list) else [str(given)]
    for key, value in options.items():
        if key == kind.positional:
            continue
        if key in ("output", "json", "help"):
            raise UsageError(f"{FILE}: {where}: a job chooses {key!r} itself")
        if isinstance(value, bool):
            if not value:
                raise UsageError(
                    f"{FILE}: {where}: leave {key!r} out instead of setting it to false"
                )
            yield f"--{key}"
            continue
        for one in value if isinstance(value, list) else [value]:
            yield from (f"--{key}" if len(key) > 1 else f"-{key}", str(one))
