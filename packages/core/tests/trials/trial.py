"""Many candidates against few goldens, each checked as `assay check generate --golden` does it."""

import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from assay.devices.run_string import parse_run
from assay.generate.check import capture as capture_golden
from assay.generate.check import check_generate
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.runs import SilentProgress
from assay.runs.results import MEASUREMENTS_FILE
from assay.stages import Stage
from assay.trace import Trace
from assay.verdicts import Verdict
from packages.core.tests.trials.kept import kept_if_asked
from packages.core.tests.trials.readings import Reading, read_readings, worst_readings

NUM_AT_A_TIME = 2
SHOWN = Console(stderr=True)
LINE_EVERY = 10

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Golden:
    """A golden for candidates of one dtype, in `folder`."""

    model: str
    dtype: str
    folder: Path
    inputs: InputOptions = field(default_factory=InputOptions)


@dataclass(frozen=True)
class Trial:
    """A candidate.

    watched: a stage whose readings are wanted, apart from the worst ones.
    folder: of the check; it is removed when the trial is over.
    """

    name: str
    golden: Golden
    run: str
    folder: Path
    setup: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    taps: Stage | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    worst: for each statistic the reading nearest to its limit, over all places.
    watched: the same at the watched stage.
    fingerprint: the same for two candidates only if they computed the same numbers.
    """

    verdict: Verdict
    worst: Mapping[str, Reading]
    taps: Mapping[str, Reading]
    fingerprint: str
    seconds: float


class TrialError(RuntimeError):
    """A trial that came to no verdict."""


def run_all(
    work: Callable[[Task], Result], tasks: Sequence[Task], line_every: int = LINE_EVERY
) -> list[Result]:
    """`work` of every task, in their order, a few at a time; a line for each few that are done.

    The processes that do it live on from task to task: what a setup function patches lies in the
    processes that they start for each candidate.

    Raises: TrialError for the first that raises; those not yet begun are left out.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        NUM_AT_A_TIME, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        kept = kept_if_asked(work)
        futures = {pool.submit(kept, task): task for task in tasks}
        for number, done in enumerate(as_completed(futures), 1):
            if number % line_every == 0 or number == len(futures):
                SHOWN.print(f"{work.__name__}: {number} of {len(futures)}")
            error = done.exception()
            if error is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                raise TrialError(f"{futures[done]}: {error}") from error
    return [future.result() for future in futures]


def capture(golden: Golden) -> float:
    """Capture it, unless it is there; returns the seconds that it took."""
    started = time.monotonic()
    if not (golden.folder / "golden.json").is_file():
        spec = GoldenSpec(
            model=golden.model,
            reference=parse_run("cpu/float32"),
            noise_for=[golden.dtype],
            inputs=golden.inputs,
            folder=golden.folder,
        )
        golden.folder.mkdir(parents=True)
        capture_golden(spec, golden.folder, SilentProgress())
    return time.monotonic() - started


def hold(trial: Trial) -> Outcome:
    """Check the candidate."""
    started = time.monotonic()
    check = GenerateCheck(
        model=trial.golden.model,
        candidate=parse_run(trial.run),
        golden=trial.golden.folder,
        setup=trial.setup,
        options=dict(trial.options),
    )
    trial.folder.mkdir(parents=True)
    verdict = check_generate(check, trial.folder, SilentProgress())
    readings = read_readings(trial.folder / MEASUREMENTS_FILE)
    outcome = Outcome(
        verdict,
        worst_readings(readings),
        worst_readings([reading for reading in readings if reading.stage == trial.taps]),
        _fingerprint(Trace.open(trial.folder / "candidate")),
        time.monotonic() - started,
    )
    shutil.rmtree(trial.folder)
    return outcome


def _fingerprint(candidate: Trace) -> str:
    seen = json.dumps(candidate.attachment_json("replay"), sort_keys=True)
    digest = hashlib.sha256(seen.encode())
    for name in sorted(one for one in candidate.attachments if one.startswith("logits.")):
        (logits,) = candidate.attachment(name).values()
        digest.update(logits.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
