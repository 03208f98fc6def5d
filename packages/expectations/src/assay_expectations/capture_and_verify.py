"""Captures an expectation in several processes, which must agree; verifies and compares expectations."""

import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError
from assay.files import UnreadableFileError
from assay.launch import RemoteFunction, call
from assay.models.sources import resolve_model
from assay.runs import Progress, provenance
from assay.runs.results import write_results
from assay.verdicts import Outcome, Verdict
from assay.watchdog import temporary_folder
from assay_expectations.changes import change_as_markdown, find_change, judge_pair
from assay_expectations.judging import (
    LIMITS,
    describe_worst,
    is_within_limits,
    judge_by,
    judge_numbers,
    judge_seen,
    values_of,
)
from assay_expectations.records import (
    AllSeen,
    Captured,
    CaptureOptions,
    Distributions,
    Expectation,
    Observed,
    VerifyRequest,
    file_for,
    read_expectation,
    require_writable,
    write_expectation,
)

_WORKER = "assay_expectations.observing"
# The fork server imports these once for all captures.
_PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    _WORKER,
)
_CAPTURE: RemoteFunction[CaptureOptions, Captured] = RemoteFunction(f"{_WORKER}:capture", _PRELOAD)
_OBSERVE: RemoteFunction[VerifyRequest, AllSeen] = RemoteFunction(
    f"{_WORKER}:observe_all", _PRELOAD
)


def capture_expectation(options: CaptureOptions, output: Path, progress: Progress) -> Path:
    """Capture the outputs of a model on a device. Returns: the file.

    output: a file, or a folder in which the key names the file.
    Raises: MachineError if the captures do not agree; UsageError if, without a reason, the capture is
        further from the yardstick than the host is, or differs by more than noise from the expectation that
        it replaces; DiskError.
    """
    parse_run(options.run)
    resolve_model(options.model)
    require_writable(output)
    with temporary_folder("assay-expect-") as scratch:
        expectation = _capture_first(options, scratch / "1", progress)
        path = file_for(expectation, output)
        _refuse_hidden_change(expectation, path, options.reason)
        for number in range(2, options.num_captures + 1):
            again = _observe_again(expectation, options.run, scratch / str(number), progress)
            expectation = _with_capture(expectation, again, number)
    widest = {name: max(one[name] for one in expectation.captures) for name in LIMITS}
    limits = {name: limit * max(1.0, widest[name]) for name, limit in LIMITS.items()}
    before = _hash_of(path)
    write_expectation(expectation.model_copy(update={"limits": limits}), path)
    outcome = "written" if before is None else "replaced"
    progress.note(f"{'unchanged' if _hash_of(path) == before else outcome}: {path}")
    return path


def _hash_of(path: Path) -> str | None:
    """Return the hash of an expectation, "" for one that cannot be read, None without the file."""
    if not path.is_file():
        return None
    try:
        return read_expectation(path).hash
    except UnreadableFileError:
        return ""


def _capture_first(options: CaptureOptions, folder: Path, progress: Progress) -> Expectation:
    """Capture in one process, and require finite numbers that agree with the host's."""
    folder.mkdir()
    (captured,) = call(_CAPTURE, options, folder=folder, name="capture 1", progress=progress)
    expectation = captured.expectation
    _require_agreement_with_host(options, expectation, captured.on_host)
    if not is_within_limits(judge_by(expectation, expectation.signature.captured)):
        raise MachineError(
            f"{options.model} gives NaN or infinity on {options.run}. Nothing was written"
        )
    origin = expectation.provenance.model_copy(update={"process": provenance()})
    return expectation.model_copy(update={"provenance": origin})


def _require_agreement_with_host(
    options: CaptureOptions, expectation: Expectation, on_host: Distributions | None
) -> None:
    """Raise UsageError if the device is further from the yardstick than the host, without a reason."""
    if options.reason is not None or on_host is None:
        return
    by_host = expectation.signature.model_copy(update={"captured": on_host})
    dtype = expectation.key.machine.dtype
    judged = judge_numbers(by_host, expectation.signature.captured, dtype, LIMITS)
    if not is_within_limits(judged):
        raise UsageError(
            f"{options.run} cannot be trusted: {describe_worst(judged, f'the error of cpu/{dtype}')}."
            " Nothing was written. To find the cause: assay check generate"
            f" {options.model} --reference cpu/float32 --candidate {options.run}. If the difference is"
            " intended: --reason TEXT"
        )


def _refuse_hidden_change(expectation: Expectation, path: Path, reason: str | None) -> None:
    """Raise UsageError if more than noise changed since the replaced expectation, without a reason.

    Otherwise small drifts of several recaptures would add up.
    """
    if reason is not None or not path.is_file():
        return
    try:
        before = read_expectation(path)
    except UnreadableFileError as error:
        raise UsageError(f"{error}. To replace it: --reason TEXT") from None
    change = find_change(before, expectation)
    if change.kind != "noise":
        raise UsageError(
            f"{path} exists, and the new capture differs from it: {change.summary}. Nothing was written."
            " If the change is intended: --reason TEXT"
        )


def _observe_again(
    expectation: Expectation, run: str, folder: Path, progress: Progress
) -> Observed:
    """Observe the model in another process, on the inputs of `expectation`."""
    file = write_expectation(expectation, folder / "expectation.json")
    request = VerifyRequest(files=[str(file)], run=run)
    name = f"capture {folder.name}"
    (observed,) = call(_OBSERVE, request, folder=folder, name=name, progress=progress)
    (seen,) = observed.seen
    if seen.observed is None:
        problem = seen.problem or "; ".join(seen.stale)
        raise MachineError(f"the model changed while it was captured: {problem}")
    return seen.observed


def _with_capture(expectation: Expectation, observed: Observed, number: int) -> Expectation:
    judged = judge_by(expectation, observed.distributions)
    if not is_within_limits(judged):
        raise MachineError(
            f"captures 1 and {number} do not agree: {describe_worst(judged, 'the error of capture 1')}."
            " Nothing was written"
        )
    return expectation.model_copy(update={"captures": [*expectation.captures, values_of(judged)]})


SHIPPED = Path(str(files("assay_expectations") / "shipped"))


def verify_expectations(
    paths: Sequence[Path],
    run: str,
    folder: Path,
    progress: Progress,
    setup: str | None = None,
    allow_unused: Sequence[str] = (),
) -> Verdict:
    """Verify the expectations in `paths`, by default the shipped ones, and write the verdict.

    setup: FILE.py:FUNC to call with each model before it runs.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    """
    parse_run(run)
    expectations = {file: read_expectation(file) for file in find_files(paths or [SHIPPED])}
    _require_unique_keys(expectations)
    request = VerifyRequest(files=[str(file) for file in expectations], run=run, setup=setup)
    (observations,) = call(_OBSERVE, request, folder=folder, name="verify", progress=progress)
    verdict, rows = judge_seen(run, list(expectations.values()), observations, allow_unused)
    if verdict.verdict is Outcome.FAIL and setup is None:
        hint = _recapture(expectations, observations, run)
        verdict = verdict.model_copy(update={"notes": [*verdict.notes, *hint]})
    return write_results(verdict, rows, folder)


def _recapture(expectations: Mapping[Path, Expectation], here: AllSeen, run: str) -> list[str]:
    """Return the command that accepts the first intended change."""
    for seen, (file, expectation) in zip(here.seen, expectations.items(), strict=True):
        is_here = expectation.key.machine == here.machine
        within = seen.observed is not None and is_within_limits(
            judge_by(expectation, seen.observed.distributions)
        )
        if is_here and seen.problem is None and not within:
            words = ["assay", "expect", "capture", expectation.model, "--run", run]
            return [f"intended? {shlex.join([*words, '--output', str(file), '--reason', 'TEXT'])}"]
    return []


def diff_expectations(expected: Path, actual: Path, folder: Path) -> str:
    """Judge the capture `actual` by the expectation `expected`, and write the verdict.

    Returns: the change, as Markdown.
    """
    before, now = read_expectation(expected), read_expectation(actual)
    verdict, rows, change = judge_pair(before, now)
    is_short = expected.name != actual.name
    sides = {
        side: {"run": f"{path.name if is_short else path} ({one.key.machine.dtype})"}
        for side, path, one in (("reference", expected, before), ("candidate", actual, now))
    }
    write_results(verdict.model_copy(update=sides), rows, folder)
    return change_as_markdown(before, now, change)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List the files in `paths` and in its folders.

    Raises: UsageError for a missing path, or a folder without expectations.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder; `assay expect capture` makes one")
        if not inside or not inside[0].is_file():
            raise UsageError(f"{path} has no expectation; `assay expect capture` makes one")
        found += inside
    return found


def _require_unique_keys(expectations: dict[Path, Expectation]) -> None:
    known: dict[str, Path] = {}
    for file, expectation in expectations.items():
        key = expectation.model + expectation.key.model_dump_json()
        if key in known:
            raise UsageError(f"{known[key]} and {file} have the same key; delete one")
        known[key] = file
