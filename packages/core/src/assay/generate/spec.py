"""The options of `assay check generate`, which travel to each of its processes. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, PositiveInt

from assay.devices.run_string import Run
from assay.errors import UsageError
from assay.models.inspect.report import LoadReport, SetupChanges
from assay.models.sources import RemoteCode
from assay.option_ranges import LARGEST_SEED, MOST, parse_count
from assay.runs.results import CANDIDATE_FOLDER, GOLDEN_FOLDER
from assay.sites import JudgedLevel, KeptFiles, RecordedLevel
from assay.verdicts import Level, Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.devices.base import Device
    from assay.models import LoadedModel


class InputOptions(Record):
    """The prompts to run, and the number of tokens to generate."""

    prompts: str | None = None
    prompt_length: str | None = None
    batch_size: PositiveInt = Field(4, le=MOST)
    max_new_tokens: PositiveInt = Field(32, le=MOST)
    chat: bool = False
    seed: int = Field(0, ge=-LARGEST_SEED, le=LARGEST_SEED)
    sampling: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSpec:
    """The options of a capture: a run of the reference that records a golden."""

    model: str
    reference: Run
    noise_for: Sequence[str]
    """Dtypes of candidates."""
    folder: Path
    """Folder of the golden."""
    inputs: InputOptions = field(default_factory=InputOptions)
    level: RecordedLevel = "module"
    max_disk: int | None = None
    """Bytes that the golden may take; None for the free space."""
    max_memory: int | None = None
    """Bytes that the reference may take; None for the free memory."""
    max_seconds: float | None = None
    """Seconds that reference and candidate may take together; None for any time."""
    remote_code: RemoteCode = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCheck:
    """The options of a check. Exactly one of `reference` and `golden` is given."""

    model: str
    candidate: Run
    reference: Run | None = None
    golden: Path | None = None
    verify_golden: bool = True
    """True to compare the bytes of `golden` with their recorded hashes."""
    inputs: InputOptions = field(default_factory=InputOptions)
    given: frozenset[str] = frozenset()
    """Options of `inputs` that the user set; they must equal the golden's."""
    level: JudgedLevel = "modules"
    setup: str | None = None
    original: str | None = None
    """The model of which `model` is a quantized form; None if it is checked by itself."""
    python: Path | None = None
    """Interpreter of the environment in which the candidate runs; None for this one."""
    options: dict[str, str] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Number of candidate ranks on each axis; empty for one process."""
    limits: str = "noise"
    allow_unused: tuple[str, ...] = ()
    """GLOBs of modules, parameters and experts that need not be compared."""
    keep: KeptFiles = "full"
    max_disk: int | None = None
    """Bytes that the golden may take."""
    max_memory: int | None = None
    """Bytes that the reference may take, and each model of the follow-up."""
    max_seconds: float | None = None
    """Seconds that both sides may take."""
    remote_code: RemoteCode = "refuse"
    command: tuple[str, ...] = ()
    """The command line that repeats the check."""
    folder: Path = Path()
    """Folder of the run. `check_generate` sets it."""

    @property
    def dtype(self) -> str:
        """Return the candidate's dtype."""
        return self.candidate.dtype

    @property
    def num_ranks(self) -> int:
        """Return the number of candidate processes."""
        return prod(self.mesh.values())

    @property
    def golden_folder(self) -> Path:
        """Return the folder of the golden, given or captured by this check."""
        return self.golden or self.folder / GOLDEN_FOLDER

    @property
    def candidate_folder(self) -> Path:
        """Return the folder of the candidate's results."""
        return self.folder / CANDIDATE_FOLDER


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """`--candidate-option NAME=VALUE`: settings of the candidate's run. None: the libraries choose."""

    threads: int | None = None
    attention: str | None = None
    experts: str | None = None
    batch_size: int | None = None
    """1: each prompt runs alone, with the padding that it has in its batch."""
    compile: bool = False

    @classmethod
    def parse(cls, options: dict[str, str]) -> Self:
        """Parse NAME=VALUE pairs. Raises: UsageError for an unknown name or value."""
        known: dict[str, Callable[[str], dict[str, Any]]] = {
            "threads": lambda text: {"threads": parse_count("candidate option threads", text)},
            "attention": lambda text: {"attention": text},
            "experts": lambda text: {"experts": text},
            "batch-size": lambda text: {"batch_size": _one(text)},
            "compile": lambda text: {"compile": _truth(text)},
            "padding": _left,
        }
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in known:
                raise UsageError(
                    f"unknown candidate option {name!r}; there are: {', '.join(sorted(known))}"
                )
            try:
                values |= known[name](text)
            except ValueError as error:
                raise UsageError(f"candidate option {name}={text}: {error}") from None
        return cls(**values)

    def apply_to_process(self) -> None:
        """Set the options that affect the whole process."""
        import torch  # slow; parsing options must not need it

        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def compiled(self, loaded: "LoadedModel", device: "Device") -> "LoadedModel":
        """Compile the model if the options say so."""
        import torch  # as above

        if not self.compile:
            return loaded
        loaded.model.forward = torch.compile(
            loaded.model.forward, backend=device.vendor.compile_backend, dynamic=True
        )
        return replace(loaded)


def _one(text: str) -> int:
    if text != "1":
        raise ValueError("only 1 is possible: each prompt alone")
    return 1


def _truth(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _left(text: str) -> dict[str, object]:
    if text != "left":
        raise ValueError("batches are padded on the left, as generation needs it")
    return {}


class CandidateReport(Record):
    """The candidate process's answer, apart from its measurements."""

    run: dict[str, Any]
    deterministic: bool
    spread: float
    weights_different: list[str]
    load: LoadReport | None = None
    changes: SetupChanges = Field(default_factory=SetupChanges)
    """Changes that the setup function made."""
    untied: list[str] = Field(default_factory=list)
    problems: dict[str, Level] = Field(default_factory=dict)
    """Results of levels without output of the candidate; nothing is attached for them."""
    notes: list[str] = Field(default_factory=list)
    peak_memory_bytes: int = 0


# A candidate that generates supports tensor parallelism only.
AXES = ("tp",)

# The fork server imports these once for all processes of a check.
PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    "assay.generate.candidate",
    "assay.generate.find_operation",
    "assay.generate.float64_rerun",
    "assay.generate.capture",
)
