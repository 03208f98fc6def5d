"""The checks of planted bugs and of their controls."""

import hashlib
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError
from assay.generate.spec import InputOptions
from assay.runs import SilentProgress
from assay.runs.results import MEASUREMENTS_FILE
from assay.stages import Stage
from assay.training.check import check_candidate, options_for, record_golden
from assay.training.reports import TrainCheck
from assay.verdicts import Outcome, Verdict
from packages.core.tests.faults.published.models import make_model
from packages.core.tests.faults.published.planted import Planted
from packages.core.tests.trials.readings import Reading, read_readings
from packages.core.tests.trials.trial import Golden, Trial, capture, hold, run_all

REFERENCE = "cpu/float32"
# A third of the default's decode steps: every fault but the size of a sample is the same.
INPUTS = InputOptions(max_new_tokens=12)


@dataclass(frozen=True)
class Work:
    """A check of a plant, or of its control.

    model: as `assay check` takes it.
    """

    planted: Planted
    dtype: str
    plant: str
    model: str
    folder: Path

    @property
    def reference(self) -> str:
        """FILE.py:NAME of what is planted."""
        return self.planted.reference_of(self.plant)

    @property
    def golden(self) -> Path:
        """One for all that are checked alike."""
        training = self.planted.training
        kind = "generate"
        if training is not None:
            check = self.train_check
            kind = check.options.model_dump_json(exclude={"model"})
        key = f"{self.planted.model} {self.dtype} {kind}"
        return self.folder / "goldens" / hashlib.sha256(key.encode()).hexdigest()[:16] / "golden"

    @property
    def own_folder(self) -> Path:
        name = f"{self.planted.bug} {self.plant} {self.planted.model} {self.dtype}"
        return self.folder / "checks" / hashlib.sha256(name.encode()).hexdigest()[:16]

    @property
    def key(self) -> tuple[str, str, str]:
        """The same for works that are one: controls are shared."""
        return self.reference, self.dtype, str(self.golden)

    @property
    def train_check(self) -> TrainCheck:
        """The check of a bug of training."""
        training = self.planted.training
        assert training is not None
        is_class = self.plant.partition(":")[2][0].isupper()
        options = training.options(self.model, self.planted.remote_code)
        return TrainCheck(
            options_for(options, training.axes, training.features),
            REFERENCE,
            f"cpu/{self.dtype}",
            trainer=self.reference if is_class else None,
            setup=None if is_class else self.reference,
            mesh=training.axes,
            features=tuple(name for name in training.features if name != "lora"),
        )


@dataclass(frozen=True)
class Checked:
    """A verdict, what was measured at the place that is right, and a digest of all numbers."""

    verdict: Verdict
    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class Finding:
    """A plant in one dtype, with the verdict on it and that on its control.

    size: relative error at the right place, in float32 where the bug exists there: nothing is
        added by rounding. Of what has to be equal, the share that differs. None if not measured.
    """

    planted: Planted
    dtype: str
    verdict: Verdict
    control: Verdict
    size: float | None

    @property
    def name(self) -> str:
        return f"{self.planted.bug} {self.dtype}"

    @property
    def found(self) -> bool:
        return self.verdict.verdict is Outcome.FAIL

    @property
    def declared(self) -> bool:
        """Whether the resolution that the check states is too coarse for the bug."""
        resolution, passed = self.verdict.resolution, self.verdict.verdict is Outcome.PASS
        size = self.size
        return passed and resolution is not None and size is not None and resolution >= size

    @property
    def placed(self) -> bool:
        location, planted = self.verdict.location, self.planted
        return (
            self.found
            and location is not None
            and location.phase == planted.phase
            and planted.module in (None, location.module or "")
        )

    @property
    def diagnosed(self) -> bool:
        return self.found and self.verdict.diagnosis in self.planted.diagnoses


def examine(chosen: Sequence[Planted], folder: Path) -> Iterator[Finding]:
    """Check every plant and every control."""
    models = {one.model: make_model(one.model, folder / _digest(one.model)) for one in chosen}
    works = [
        Work(one, dtype, plant, models[one.model], folder)
        for one in chosen
        for dtype in one.dtypes
        for plant in (one.plant, one.control)
    ]
    distinct = list({work.key: work for work in works}.values())
    run_all(record, list({work.golden: work for work in distinct}.values()))
    checked = dict(zip((work.key for work in distinct), run_all(judge, distinct), strict=True))
    for plant, control in zip(works[::2], works[1::2], strict=True):
        in_float32 = next(w for w in works if w.planted is plant.planted and w.plant == plant.plant)
        yield Finding(
            plant.planted,
            plant.dtype,
            checked[plant.key].verdict,
            checked[control.key].verdict,
            _size(checked[in_float32.key].readings),
        )


def record(work: Work) -> None:
    """Make the golden of a check."""
    if work.planted.training is not None:
        record_golden(work.train_check, work.golden, SilentProgress())
    else:
        capture(Golden(work.model, work.dtype, work.golden, INPUTS))


def judge(work: Work) -> Checked:
    """Check the candidate; what came to no verdict is NOT_COMPARED with the reason."""
    folder = work.own_folder
    try:
        if work.planted.training is None:
            return _generate(work)
        folder.mkdir(parents=True)
        verdict = check_candidate(work.train_check, work.golden, folder, SilentProgress())
        readings = read_readings(folder / MEASUREMENTS_FILE)
    except AssayError as error:
        verdict = Verdict(verdict=Outcome.NOT_COMPARED, notes=[f"no verdict: {error}"])
        return Checked(verdict, ())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Checked(verdict, _at_place(work.planted, readings))


def _generate(work: Work) -> Checked:
    planted = work.planted
    trial = Trial(
        planted.bug,
        Golden(work.model, work.dtype, work.golden, INPUTS),
        f"cpu/{work.dtype}",
        work.own_folder,
        setup=work.reference,
        taps=Stage(planted.module or "", planted.phase),
    )
    outcome = hold(trial)
    return Checked(outcome.verdict, tuple(outcome.taps.values()))


def _at_place(planted: Planted, readings: Iterable[Reading]) -> tuple[Reading, ...]:
    return tuple(
        one
        for one in readings
        if one.stage.phase == planted.phase and planted.module in (None, one.stage.module)
    )


def _size(readings: Sequence[Reading]) -> float | None:
    for statistic in ("exact", "replay-tensor"):
        errors = [one.actual for one in readings if one.statistic == statistic]
        errors = [error for error in errors if math.isfinite(error) and error > 0]
        if errors:
            return max(errors)
    return None


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
