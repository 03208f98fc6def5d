"""The machines and the settings of GitHub, read from runners/runners.toml and runners/github.toml."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from assay.errors import UsageError
from assay.files import describe_problem, read_toml


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def _is_free(name: str) -> str:
    if name == "all":
        raise ValueError("labels use 'all' for every vendor")
    return name


def _is_repository(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.git)", name):
        raise ValueError(f"{name!r} is not OWNER/NAME, such as acme-llm/assay")
    return name


def _sets_no_reserved_variable(names: dict[str, str]) -> dict[str, str]:
    if taken := sorted(names.keys() & {"PATH", "HOME", "PYTHONPATH", "ASSAY_TORCH"}):
        raise ValueError(f"{', '.join(taken)}: the runner sets it, and jobs rely on it")
    return names


NonEmpty = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$", max_length=20), AfterValidator(_is_free)]
RelativePattern = Annotated[str, Field(pattern=r"^[^/]")]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
Hexadecimal = Annotated[str, Field(pattern=r"^0x[0-9a-f]+$")]
Absolute = Annotated[str, Field(pattern=r"^(/.+)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Variables = Annotated[dict[Variable, str], AfterValidator(_sets_no_reserved_variable)]


class Entry(BaseModel):
    """A table of a file, whose head describes the fields. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shown(Entry):
    """The device nodes and files that show a loaded driver."""

    by: tuple[RelativePattern, ...]
    made_by: tuple[NonEmpty, ...] = ()
    pci_vendor: Hexadecimal | None = None
    pci_classes: tuple[Hexadecimal, ...] = ()

    @property
    def is_of_macos(self) -> bool:
        """The drivers lie in folders of macOS, where launchd starts the runner."""
        return any(pattern.startswith(("Library/", "System/")) for pattern in self.by)


class Torch(Entry):
    """The torch that uses the devices."""

    from_registry: bool = Field(strict=True)
    plugin: str = ""


class Image(Entry):
    """The base of a runner's container."""

    base: str
    python: NonEmpty = "python3"


class Health(Entry):
    """The vendor's program that lists the cards, run before and after each job."""

    command: tuple[NonEmpty, ...] = Field(min_length=1)
    card_pattern: Pattern


class RunnerKind(Entry):
    """The runners of a vendor with one number of cards."""

    cards: int = Field(ge=0, le=1024, strict=True)
    sessions: tuple[Literal["check", "smoke", "expectations", "bench"], ...] = Field(min_length=1)
    timeout_minutes: int = Field(ge=5, le=360, strict=True)
    budget_minutes: int = Field(ge=1, le=300, strict=True)
    max_runners: int = Field(ge=1, le=1000, strict=True)

    @model_validator(mode="after")
    def _is_consistent(self) -> "RunnerKind":
        if len(set(self.sessions)) < len(self.sessions):
            raise ValueError(f"sessions {', '.join(self.sessions)}: one is named twice")
        if self.budget_minutes >= self.timeout_minutes:
            raise ValueError(
                f"budget_minutes {self.budget_minutes} leaves no time for installing within"
                f" timeout_minutes {self.timeout_minutes}"
            )
        return self


class Vendor(Entry):
    """An entry of runners.toml."""

    name: Name
    title: NonEmpty
    resources: tuple[NonEmpty, ...]
    scheduler: str = ""
    shown: Shown
    torch: Torch
    image: Image | None = None
    health: Health | None = None
    variables: Variables = {}
    model_cache: Absolute = ""
    runners: tuple[RunnerKind, ...] = Field(min_length=1)
    unverified: tuple[NonEmpty, ...] = ()

    @model_validator(mode="after")
    def _is_whole(self) -> "Vendor":
        cards = [kind.cards for kind in self.runners]
        if cards != sorted(set(cards)):
            raise ValueError(f"runners: cards {cards} must rise, each number once")
        if cards[:2] == [0, 1]:
            raise ValueError("runners: 0 cards and 1 card would have the same label")
        if bool(self.health) != any(cards):
            missing = "health is missing, and a runner has cards"
            raise ValueError("health, and no runner has cards" if self.health else missing)
        if (self.shown.pci_vendor is None) != (not self.shown.pci_classes):
            raise ValueError("shown: pci_vendor and pci_classes go together")
        if self.resources and self.image is None:
            raise ValueError("image: a pod with a device needs one")
        unknown = [field for field in self.unverified if field not in type(self).model_fields]
        if unknown:
            raise ValueError(f"unverified: {', '.join(unknown)} is not a field")
        for resource in self.resources:
            if not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9_.-]+", resource):
                raise ValueError(f"resources: {resource!r} is not a qualified name")
        return self


class Runner(BaseModel):
    """A vendor's runners with one number of cards: the destination of a job."""

    model_config = ConfigDict(frozen=True)

    vendor: Vendor
    kind: RunnerKind

    @property
    def suffix(self) -> str:
        """The end of its target and of the names of its files: "", "-4"."""
        return "" if self.kind.cards <= 1 else f"-{self.kind.cards}"

    @property
    def target(self) -> str:
        """The name in labels of pull requests and in dispatches: "nvidia", "nvidia-4"."""
        return f"{self.vendor.name}{self.suffix}"

    @property
    def label(self) -> str:
        """The label for `runs-on`: "assay-nvidia", "assay-nvidia-4"."""
        return f"assay-{self.target}"


class GitHub(Entry):
    """The settings in runners/github.toml."""

    server: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    repository: Annotated[str, AfterValidator(_is_repository)]
    plan: Literal["public", "free", "team", "enterprise"] = "public"
    protected_ref: NonEmpty
    runner_group: NonEmpty
    hosted: NonEmpty
    pythons: tuple[NonEmpty, ...] = Field(min_length=1)
    bench_python: NonEmpty
    runner_version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    runner_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    nightly: NonEmpty
    reaper: NonEmpty

    @property
    def organization(self) -> str:
        """The owner of the repository."""
        return self.repository.split("/")[0]

    @property
    def is_enterprise_server(self) -> bool:
        """The organization has its own GitHub, which lacks some features of github.com."""
        return self.server != "github.com"

    @property
    def has_reviewers(self) -> bool:
        """Environments may have reviewers, runner groups selected workflows, and branches a merge queue."""
        return self.is_enterprise_server or self.plan in ("public", "enterprise")

    @property
    def has_protection(self) -> bool:
        """There are environments and protected branches."""
        return self.is_enterprise_server or self.plan != "free"

    @property
    def api(self) -> str:
        """The address of the REST API."""
        return (
            f"https://{self.server}/api/v3"
            if self.is_enterprise_server
            else "https://api.github.com"
        )

    @property
    def own(self) -> str:
        """The prefix of our own actions and workflows. GitHub Enterprise Server does not know "$/"."""
        return "./" if self.is_enterprise_server else "$/"

    @property
    def job_action(self) -> str:
        """The action of repository.yml. "./" would be a file of the repository that calls it."""
        action = ".github/actions/job"
        if self.is_enterprise_server:
            return f"{self.repository}/{action}@{self.protected_ref}"
        return f"{self.own}{action}"


class Fleet(BaseModel):
    """All machines, and the settings of GitHub."""

    model_config = ConfigDict(frozen=True)

    github: GitHub
    vendors: tuple[Vendor, ...]

    def runners(self) -> Iterator[Runner]:
        """Yield the runners of all vendors, in the order of the file."""
        for vendor in self.vendors:
            for kind in vendor.runners:
                yield Runner(vendor=vendor, kind=kind)

    def find(self, target: str) -> Runner | None:
        """Find the runner of a target, such as "nvidia-4"."""
        return next((runner for runner in self.runners() if runner.target == target), None)


RUNNERS_FILE = Path("runners/runners.toml")
GITHUB_FILE = Path("runners/github.toml")

_Table = TypeVar("_Table", bound=BaseModel)


def read_fleet(root: Path) -> Fleet:
    """Read the two files below `root`.

    Raises: UsageError with a line for each wrong table and field.
    """
    github = validate_entry(GitHub, _read_toml(root / GITHUB_FILE), root / GITHUB_FILE)
    return Fleet(github=github, vendors=tuple(read_vendors(root / RUNNERS_FILE)))


def read_vendors(file: Path) -> list[Vendor]:
    """Read the vendors of one file. Raises: as `read_fleet`."""
    vendors = []
    for name, table in _read_toml(file).items():
        if not isinstance(table, dict):
            raise UsageError(f"{file}: {name} is outside of a vendor's table")
        vendors.append(validate_entry(Vendor, {"name": name, **table}, file, f" [{name}]"))
    if not vendors:
        raise UsageError(f"{file} has no vendor")
    return vendors


def _read_toml(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise UsageError(f"{file}: no such file; name a checkout of assay with --root")
    return read_toml(file)


def validate_entry(
    model: type[_Table], table: dict[str, Any], file: Path, name: str = ""
) -> _Table:
    """Make an entry. Raises: UsageError with a line for each wrong field."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        known = sorted({str(one["loc"][-1]) for one in error.errors() if one["type"] == "missing"})
        known += list(model.model_fields)
        # pydantic also reports a list without valid entries as too short.
        wrong = [one for one in error.errors() if one["type"] != "too_short"] or error.errors()
        lines = [f"{file}{name}: {_describe_error(one, known)}" for one in wrong]
        raise UsageError("\n".join(lines)) from None


def _describe_error(error: Mapping[str, Any], known: list[str]) -> str:
    """Describe one mistake, its place and its problem, in terms of TOML.

    known: the field names to suggest for an unknown one.
    """
    place = [f"[{part + 1}]" if isinstance(part, int) else str(part) for part in error["loc"]]
    field = ".".join(place).replace(".[key]", "").replace(".[", "[")
    problem = describe_problem(error["msg"])
    if error["type"] == "extra_forbidden":
        nearest = get_close_matches(str(error["loc"][-1]), known, n=1)
        problem = f"there is no such field{f'; nearest is {nearest[0]}' if nearest else ''}"
    elif error["type"] == "missing":
        problem = "it is missing"
    else:
        problem = _TOML_PROBLEMS.get(error["type"], problem)
    return f"{field}: {problem}" if field else problem


_TOML_PROBLEMS = {
    "tuple_type": "it has to be an array: [...]",
    "model_type": "it has to be a table: { ... }",
    "dict_type": "it has to be a table: { ... }",
    "string_type": 'it has to be a string: "..."',
    "int_type": "it has to be a whole number, without quotes",
}
