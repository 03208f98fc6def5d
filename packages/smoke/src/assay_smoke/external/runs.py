"""The runs of a training library, and its checkpoints as users of plain transformers or peft read them."""

import glob
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from assay.dtypes import FORMATS
from assay.errors import AssayError, UsageError, name_some
from assay.files.reading import read_text
from assay.models import load_model
from assay.models.load import stored_dtype
from assay.runs import Progress
from assay.training.state.files import hash_value
from assay.training.trainers.adapters import read_adapter
from assay.verdicts import Measurement, Ratio
from assay_smoke.external.library import ExternalLibrary, fill
from assay_smoke.external.watched_run import Run, make
from assay_smoke.judging import differing_keys

if TYPE_CHECKING:
    from assay.sites import Phase

_STEP = r"(?P<step>\d+)"

# Settings of Hugging Face or peft that make training depend on the split: a positive dropout, whose
# masks depend on it (attention_dropout, resid_pdrop, lora_dropout), or a loss that balances experts
# over a micro-batch.
_SPLIT_DEPENDENCE = re.compile(
    r'"(\w*drop\w*)":\s*(\d*\.?\d*[1-9][\d.e-]*)|"(output_router_logits)":\s*(true)'
)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The contents of a checkpoint."""

    step: int
    hashes: Mapping[str, str] = field(default_factory=dict)
    """Hash of each tensor by name."""
    not_finite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    """Tensors whose elements are all zero."""
    only_shrunk: bool = False
    """Since the checkpoint before, or the start, elements moved, all of them toward zero."""
    dtype: str = "float32"
    """The floating dtype with the most digits."""
    problem: str | None = None
    """Why the checkpoint cannot be read. The other fields are then empty."""


def find_checkpoints(pattern: str) -> dict[int, Path]:
    """Find the paths that match `pattern`, by step in rising order.

    pattern: an absolute path with {step}, in which * matches anything.
    """
    anywhere = "*".join(glob.escape(part).replace("[*]", "*") for part in pattern.split("{step}"))
    parts = [re.escape(part).replace(r"\*", "[^/]*") for part in pattern.split("{step}")]
    # The first placeholder captures the number, and the others repeat it.
    expression = re.compile(f"{parts[0]}{_STEP}{'(?P=step)'.join(parts[1:])}")
    found: dict[int, Path] = {}
    for path in glob.glob(anywhere):  # noqa: PTH207 - of an absolute pattern
        if match := expression.fullmatch(path):
            found[int(match["step"])] = Path(path)
    return dict(sorted(found.items()))


def checkpoints_of(run: Run) -> dict[int, Path]:
    """Find the checkpoints of a run by the number of steps before them."""
    checkpoints = run.library.checkpoints
    return _by_step(run, checkpoints.folder, checkpoints.numbers)


def is_complete(run: Run) -> bool:
    """Return True if a run ended by itself, after its last step and with its last checkpoint if it failed."""
    if run.exit_code and not (run.made_all_steps and run.library.steps in checkpoints_of(run)):
        return False
    return run.hung_in is None


def copy_until(step: int, source: Run, run: Run) -> Path:
    """Copy the output of `source` to `run` without the checkpoints after `step`.

    Returns: the checkpoint of `step`.
    """
    shutil.copytree(source.output, run.output, symlinks=True)
    paths = list(checkpoints_of(run).items())
    checkpoints = run.library.checkpoints
    if checkpoints.state is not None:
        paths += _by_step(run, checkpoints.state, checkpoints.state_numbers).items()
    for number, path in paths:
        if number > step:
            shutil.rmtree(path)
    return checkpoints_of(run)[step]


def _absolute(run: Run, pattern: str) -> str:
    return str(run.working_folder.resolve() / fill(pattern, run.placeholders))


def _by_step(run: Run, pattern: str, numbers: tuple[int, int] | None) -> dict[int, Path]:
    found = {
        run.library.step_of(number, numbers): path
        for number, path in find_checkpoints(_absolute(run, pattern)).items()
    }
    return {step: path for step, path in found.items() if step is not None}


def read_history(
    run: Run, folders: Mapping[int, Path], start: Mapping[str, Tensor] | None = None
) -> Iterator[SavedModel]:
    """Read checkpoints one after the other, each with its change since the one before.

    start: the tensors before the first one.
    """
    before = start
    for step, folder in folders.items():
        try:
            tensors = read_tensors(run, folder)
        except AssayError as error:
            yield SavedModel(step, problem=str(error))
            continue
        saved = saved_of(step, tensors)
        yield replace(saved, only_shrunk=before is not None and only_shrinks(tensors, before))
        before = tensors


def only_shrinks(actual: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    """Return True if elements moved, and all of them toward zero, as weight decay alone moves them.

    Rounding keeps the order of numbers, so this holds in every dtype. A gradient moves about half of
    all elements away from zero.
    """
    pairs = [(one, before[name]) for name, one in actual.items() if name in before]
    moved = any(not one.equal(old) for one, old in pairs)
    return moved and all(
        one.shape == old.shape
        and bool((one.abs() <= old.abs()).all())
        and bool((one.sign() * old.sign() >= 0).all())
        for one, old in pairs
    )


def saved_of(step: int, tensors: Mapping[str, Tensor]) -> SavedModel:
    """Describe the tensors of a checkpoint, or of the initial model."""
    return SavedModel(
        step,
        {name: hash_value(tensor) for name, tensor in tensors.items()},
        tuple(sorted(name for name, one in tensors.items() if not bool(one.isfinite().all()))),
        tuple(sorted(name for name, one in tensors.items() if not bool(one.any()))),
        dtype=dtypes_by_digits(tensors)[0],
    )


def read_tensors(run: Run, folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by name. Raises: AssayError if it cannot be read."""
    checkpoints = run.library.checkpoints
    model = folder / checkpoints.model
    if checkpoints.kind == "adapter":
        _load_by_peft(run.model, model)
        return read_adapter(model)
    if not model.is_dir():
        raise UsageError(f"{folder} has no folder {checkpoints.model}")
    return load_tensors(model, stored_dtype(str(model), "refuse"))


def find_split_dependence(model: Path) -> str | None:
    """Find a setting in a folder that makes training depend on the split, as "lora_dropout 0.1"."""
    for file in (model / "adapter_config.json", model / "config.json"):
        if file.is_file() and (found := _SPLIT_DEPENDENCE.search(read_text(file))):
            return " ".join(filter(None, found.groups()))
    return None


def dtypes_by_digits(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the floating dtypes, that with the most digits first; float32 without one."""
    names = {str(one.dtype).removeprefix("torch.") for one in tensors.values()} & FORMATS.keys()
    return sorted(names or {"float32"}, key=lambda name: FORMATS[name].unit_roundoff)


def load_tensors(model: Path, dtype: str) -> dict[str, Tensor]:
    """Load the tensors of a model folder by transformers."""
    return dict(load_model(str(model), dtype=dtype).model.state_dict())


def _load_by_peft(start: Path, adapter: Path) -> None:
    """Load an adapter by peft. Raises: UsageError if that fails or the file lacks tensors."""
    from peft import PeftModel, get_peft_model_state_dict

    tensors = read_adapter(adapter)
    base: Any = load_model(str(start), dtype=stored_dtype(str(start), "refuse")).model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(base, str(adapter))
            held = get_peft_model_state_dict(loaded, save_embedding_layers=False)
    except Exception as error:  # peft does not wrap errors
        raise UsageError(f"peft cannot load {adapter}: {type(error).__name__}: {error}") from error
    # peft leaves tensors that the file lacks at their initial values.
    if missing := sorted(held.keys() - tensors.keys()):
        raise UsageError(
            f"{adapter} lacks {len(missing)} of {len(held)} tensors of its adapter:"
            f" {name_some(missing)}"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Errors of a resumed run relative to those of a repeated one, with their limits."""

    losses: Ratio
    ends: Ratio
    moved: float
    """Change by training since the checkpoint, in the unit of the error of the ends."""


# The order in which runs are reported.
_ORDER = (
    "uninterrupted", "resumed", "repeated", "interrupted", "equivalent", "after-sigterm", "first-save",
)  # fmt: skip


@dataclass
class Cycle:
    """The runs of a library. A level that needs another run makes it."""

    uninterrupted: Run
    """The others differ from it."""
    progress: Progress
    made: dict[str, Run] = field(default_factory=dict)
    """Runs by name."""
    saved: dict[int, SavedModel] = field(default_factory=dict)
    """Checkpoints of the uninterrupted run by step; none if it is not complete."""
    start: SavedModel | None = None
    """The initial model in the dtype of the checkpoints; None for an adapter, which begins at random."""
    spreads: dict[str, Spread | None] = field(default_factory=dict)
    """Of the levels whose resumed run ends differently; None if two uninterrupted runs do not differ."""
    _files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def library(self) -> ExternalLibrary:
        """Return the library."""
        return self.uninterrupted.library

    @property
    def runs(self) -> list[Run]:
        """Return the runs made so far, in the order of reports."""
        return [self.made[name] for name in _ORDER if name in self.made]

    @property
    def last(self) -> SavedModel | None:
        """Return the last checkpoint of the uninterrupted run."""
        return self.saved.get(self.library.steps)

    @property
    def narrowing(self) -> str:
        """Say that a checkpoint has fewer digits than `precision`; "" if none has."""
        wide = self.library.precision
        for one in self.saved.values():
            if wide and FORMATS[one.dtype].unit_roundoff > FORMATS[wide].unit_roundoff:
                return f"checkpoints are {one.dtype}, with fewer digits than `precision`, {wide}"
        return ""

    @property
    def changed_files(self) -> list[str]:
        """Return the files of the initial model's folder that changed since the first run began."""
        return sorted(differing_keys(self._files, _listing(self.uninterrupted.model)))

    def run(self, name: str, **changes: Any) -> Run:  # noqa: ANN401 - fields of a run
        """Make the run `name`, which differs from the uninterrupted one by `changes`."""
        self.made[name] = make(replace(self.uninterrupted, name=name, **changes), self.progress)
        return self.made[name]

    def end_of(self, one: Run) -> Path | None:
        """Return the folder of a run's last checkpoint; None without one or for an incomplete run."""
        return checkpoints_of(one).get(self.library.steps) if is_complete(one) else None

    def read_end(self, one: Run) -> SavedModel | None:
        """Read a run's last checkpoint; None without one or for an incomplete run."""
        folder = self.end_of(one)
        return None if folder is None else next(read_history(one, {self.library.steps: folder}))

    def begin(self) -> None:
        """Make the uninterrupted run and read its checkpoints.

        Raises: MachineError for an absent package; UsageError for a library that contradicts its file.
        """
        first, checkpoints = self.uninterrupted, self.library.checkpoints
        self._files = _listing(first.model)
        self.made[first.name] = make(first, self.progress)
        first.require_modules()
        if not is_complete(first):
            return
        first.require_losses()
        if not (found := checkpoints_of(first)):
            folders = (path for path in first.output.rglob("*") if path.is_dir())
            there = sorted(str(path.relative_to(first.output)) for path in folders)
            held = f"the folders {name_some(there, 8)}" if there else "no folder"
            raise UsageError(
                f"checkpoints.folder: nothing matches {_absolute(first, checkpoints.folder)},"
                f" although training ended well; {first.output} contains {held}"
            )
        start = None
        if checkpoints.kind == "hugging-face":
            with suppress(AssayError):  # the level `checkpoint` says why it cannot be read
                last = found[max(found)] / checkpoints.model
                start = load_tensors(first.model, stored_dtype(str(last), "refuse"))
                self.start = saved_of(0, start)
        with self.progress.task("reading checkpoints", len(found)) as task:
            for saved in read_history(first, found, start):
                self.saved[saved.step] = saved
                task.advance()


# Runs whose values are drawn, by the side of their curve. The others have steps of their own.
_DRAWN = {
    "uninterrupted": "uninterrupted", "repeated": "repeated", "resumed": "resumed", "equivalent": "split",
}  # fmt: skip


def rows_of_logs(cycle: Cycle) -> Iterator[Measurement]:
    """Yield the logged values of each step, for display only."""
    phases: tuple[Phase, ...] = ("forward", "clip", "optimizer")
    for run in (run for run in cycle.runs if run.name in _DRAWN):
        for step, logged in enumerate(run.losses, run.first_step + 1):
            values = {
                "loss": logged.loss, "grad-norm": logged.grad_norm, "learning-rate": logged.learning_rate,
            }  # fmt: skip
            for phase, (port, value) in zip(phases, values.items(), strict=True):
                if value is not None:
                    yield Measurement(
                        level="loss", module="", port=port, phase=phase, step=step, actual=value,
                        statistic=f"{_DRAWN[run.name]}-{port}", expected=math.nan, ratio=math.nan,
                    )  # fmt: skip


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }
