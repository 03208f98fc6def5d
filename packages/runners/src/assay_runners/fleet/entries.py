"""What a vendor's entry says, and each kind of its runners: one for every number of cards."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


def _is_free(name: str) -> str:
    if name == "all":
        raise ValueError("'all' is what labels call every vendor")
    return name


def _sets_none_of_ours(names: dict[str, str]) -> dict[str, str]:
    if taken := sorted(names.keys() & {"PATH", "HOME", "PYTHONPATH", "ASSAY_TORCH"}):
        raise ValueError(f"{', '.join(taken)}: the runner's own, which a job relies on")
    return names


NonEmpty = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$", max_length=20), AfterValidator(_is_free)]
RelativePattern = Annotated[str, Field(pattern=r"^[^/]")]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
Hexadecimal = Annotated[str, Field(pattern=r"^0x[0-9a-f]+$")]
Absolute = Annotated[str, Field(pattern=r"^(/.+)?$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Variables = Annotated[dict[Variable, str], AfterValidator(_sets_none_of_ours)]


class Entry(BaseModel):
    """A table of the file; a field that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shown(Entry):
    """What the operating system shows where a driver is loaded.

    by: patterns below "/", one of which exists there.
    made_by: the vendor's program that makes them after a start of the machine, with its words; run by
        root before a machine on its own registers.
    pci_vendor, pci_classes: for nodes that several vendors share.
    """

    by: tuple[RelativePattern, ...]
    made_by: tuple[NonEmpty, ...] = ()
    pci_vendor: Hexadecimal | None = None
    pci_classes: tuple[Hexadecimal, ...] = ()

    @property
    def is_of_macos(self) -> bool:
        """Whether drivers lie where macOS alone has them: launchd starts the runner there."""
        return any(pattern.startswith(("Library/", "System/")) for pattern in self.by)


class Torch(Entry):
    """Which torch uses the devices.

    from_registry: whether the registry's own build does.
    plugin: the module that makes torch know them; "" where torch itself does.
    """

    from_registry: bool = Field(strict=True)
    plugin: str = ""


class Image(Entry):
    """What the container of a runner is made from.

    base: the vendor's image, with the driver's libraries and the vendor's torch; "" where none is
        public, and whoever builds the image must name one.
    python: the Python there that has this torch.
    """

    base: str
    python: NonEmpty = "python3"


class Health(Entry):
    """The vendor's own program that lists the cards, run before and after each job.

    command: its words; an exit code other than 0 takes the machine out of service.
    card_pattern: a regular expression of which every card that is fit for a job gives one match in
        what it prints.
    """

    command: tuple[NonEmpty, ...] = Field(min_length=1)
    card_pattern: Pattern


class RunnerKind(Entry):
    """Runners with one number of cards.

    cards: how many cards a job gets; 0 for machines without an accelerator.
    sessions: the nox sessions that may run there, in this order.
    timeout_minutes: after which GitHub ends a job.
    budget_minutes: what the smoke session may plan for; less than the timeout.
    max_runners: how many jobs run at a time; further ones wait.
    """

    cards: int = Field(ge=0, le=1024, strict=True)
    sessions: tuple[NonEmpty, ...] = Field(min_length=1)
    timeout_minutes: int = Field(ge=5, le=360, strict=True)
    budget_minutes: int = Field(ge=1, le=300, strict=True)
    max_runners: int = Field(ge=1, le=1000, strict=True)

    @model_validator(mode="after")
    def _leaves_time_beside_the_budget(self) -> "RunnerKind":
        if len(set(self.sessions)) < len(self.sessions):
            raise ValueError(f"sessions {', '.join(self.sessions)}: one is named twice")
        if self.budget_minutes >= self.timeout_minutes:
            raise ValueError(
                f"budget_minutes {self.budget_minutes} leaves no time for installing within"
                f" timeout_minutes {self.timeout_minutes}"
            )
        return self


class Vendor(Entry):
    """An entry of runners.toml; `name` is that of its table, the rest stands at its head.

    also_called: what people write for it in a label; the refusal then names the vendor.
    unverified: the fields that nobody has seen work on such a machine yet.
    """

    name: Name
    title: NonEmpty
    also_called: tuple[Name, ...] = ()
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
            raise ValueError(f"unverified: {', '.join(unknown)} is no field")
        for resource in self.resources:
            if not re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9_.-]+", resource):
                raise ValueError(f"resources: {resource!r} is no qualified name")
        return self


class Runner(BaseModel):
    """A vendor's runners with one number of cards: what a job can be sent to."""

    model_config = ConfigDict(frozen=True)

    vendor: Vendor
    kind: RunnerKind

    @property
    def target(self) -> str:
        """How labels of pull requests and dispatches name it: "nvidia", "nvidia-4"."""
        cards = self.kind.cards
        return self.vendor.name if cards <= 1 else f"{self.vendor.name}-{cards}"

    @property
    def label(self) -> str:
        """The label that `runs-on` asks for: "assay-nvidia", "assay-nvidia-4"."""
        return f"assay-{self.target}"


class GitHub(Entry):
    """runners/github.toml: where assay lives on GitHub.

    repository: OWNER/NAME.
    protected_ref: the branch that nobody pushes to; accelerators take jobs of its workflows alone.
    runner_group: the group of all accelerators, restricted to accelerator.yml at that branch.
    hosted: the label of GitHub's own machines.
    pythons: the versions of Python that the first tiers run with, the oldest first.
    bench_python: that of the shipped baselines of the bench session.
    runner_version, runner_digest: the release of GitHub's runner that the images are made with, and
        the digest of its image.
    nightly, reaper: when the two workflows with a schedule start, as cron has it.
    """

    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    protected_ref: NonEmpty
    runner_group: NonEmpty
    hosted: NonEmpty
    pythons: tuple[NonEmpty, ...] = Field(min_length=1)
    bench_python: NonEmpty
    runner_version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    runner_digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    nightly: NonEmpty
    reaper: NonEmpty


class Fleet(BaseModel):
    """All machines."""

    model_config = ConfigDict(frozen=True)

    github: GitHub
    vendors: tuple[Vendor, ...]

    def runners(self) -> Iterator[Runner]:
        """Every vendor's, in the order of the file."""
        for vendor in self.vendors:
            for kind in vendor.runners:
                yield Runner(vendor=vendor, kind=kind)

    def find(self, target: str) -> Runner | None:
        """The runner that "nvidia-4" names."""
        return next((runner for runner in self.runners() if runner.target == target), None)
