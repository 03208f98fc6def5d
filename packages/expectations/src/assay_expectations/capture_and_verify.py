"""Captures an expectation in several processes, which must agree; verifies and compares expectations."""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError, assay_command, did_you_mean
from assay.files import UnreadableFileError, read_pipe
from assay.foreign_text import shorten
from assay.inputs import is_expectation
from assay.judge.wording import format_count
from assay.launch import RemoteFunction, call
from assay.models.sources import resolve_model
from assay.runs import Progress, provenance
from assay.runs.provenance import run_git
from assay.runs.results import write_results
from assay.verdicts import NextStep, Verdict
from assay.watchdog import temporary_folder
from assay_expectations.changes import change_as_markdown, find_change, judge_pair, model_change
from assay_expectations.explaining import check_command, may_hide_setup
from assay_expectations.judging import (
    describe_worst,
    is_within_limits,
    judge_by,
    judge_numbers,
    limits_of,
    values_of,
)
from assay_expectations.records import (
    AllSeen,
    BrokenExpectationError,
    Captured,
    CaptureOptions,
    Distributions,
    Exact,
    Expectation,
    Machine,
    Observed,
    Reference,
    ReferenceRequest,
    VerifyRequest,
    file_for,
    list_steps,
    parse_expectation,
    read_expectation,
    require_writable,
    versions_of_encoding,
    write_expectation,
)
from assay_expectations.verdict import SHIPPED, judge_seen

_WORKER = "assay_expectations.observing"
_EXPLAINER = "assay_expectations.references"
# The fork server imports these once for all captures.
_PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    _WORKER,
    _EXPLAINER,
)
_CAPTURE: RemoteFunction[CaptureOptions, Captured] = RemoteFunction(f"{_WORKER}:capture", _PRELOAD)
_OBSERVE: RemoteFunction[VerifyRequest, AllSeen] = RemoteFunction(
    f"{_WORKER}:observe_all", _PRELOAD
)
_SET_UP: RemoteFunction[VerifyRequest, list[Exact | str]] = RemoteFunction(
    f"{_EXPLAINER}:observe_setups", _PRELOAD
)
_REFER: RemoteFunction[ReferenceRequest, list[Reference]] = RemoteFunction(
    f"{_EXPLAINER}:observe_references", _PRELOAD
)


def capture_expectation(options: CaptureOptions, output: Path, progress: Progress) -> Path:
    """Capture the outputs of a model on a device. Returns: the file.

    output: a file, or a folder in which the key names the file.
    Raises: MachineError if the captures do not agree; UsageError if, without a reason, the capture is
        further from the yardstick than the host is, differs by more than noise from the expectation that
        it replaces, or replaces an approved one; DiskError.
    """
    parse_run(options.run)
    resolve_model(options.model)
    if options.settings.chat and options.prompts is None:
        raise UsageError("--chat is for the texts of --prompts FILE.jsonl")
    require_writable(output)
    with temporary_folder("assay-expect-") as scratch:
        expectation = _capture_first(options, scratch / "1", progress)
        path = file_for(expectation, output)
        before = _read_replaced(path, options.reason, progress)
        if before is not None:
            _refuse_hidden_change(before, expectation, path, options.reason)
        for number in range(2, options.num_captures + 1):
            again = _observe_again(expectation, options.run, scratch / str(number), progress)
            expectation = _with_capture(expectation, again, number)
    usual = limits_of(expectation.signature)
    widest = {name: max(one[name] for one in expectation.captures) for name in usual}
    limits = {name: limit * max(1.0, widest[name]) for name, limit in usual.items()}
    expectation = expectation.model_copy(update={"limits": limits})
    outcome = "replaced" if path.is_file() else "written"
    if before is not None:
        if before.hash == expectation.content_hash():
            if options.reason is None and options.approved_by is None:
                # Only date and command would change, and an approval would be lost.
                progress.note(f"unchanged: {path}")
                return path
            outcome, earlier = "approved", before.provenance
            kept = {
                "approved_by": options.approved_by or earlier.approved_by,
                "reason": options.reason or earlier.reason,
            }
            origin = expectation.provenance.model_copy(update=kept)
            expectation = expectation.model_copy(update={"provenance": origin})
        elif before.provenance.approved_by is not None and options.reason is None:
            raise UsageError(
                f"{path} was approved by {before.provenance.approved_by}, and the new capture differs from it"
                f" within the limits: {find_change(before, expectation).summary}. Nothing was written. To"
                " replace it, add --reason TEXT, and --approved-by NAME to approve it again"
            )
        elif difference := _describe_difference(before, expectation):
            progress.note(difference)
        if (approved := before.provenance.approved_by) and not expectation.provenance.approved_by:
            progress.note(
                f"the approval of {approved} is dropped, because the new capture differs. To approve it, repeat the"
                " command with --approved-by NAME"
            )
    write_expectation(expectation, path)
    captures = format_count(len(expectation.captures), "capture")
    progress.note(f"{outcome}: {path}, of {captures}")
    return path


def _describe_difference(before: Expectation, expectation: Expectation) -> str:
    """Name what differs besides rounding; "" for nothing."""
    change = find_change(before, expectation)
    named = [*model_change(before, expectation), *change.content, change.answer]
    return "; ".join(filter(None, named))


def with_settings_of_earlier(
    options: CaptureOptions, given: Mapping[str, Any], output: Path
) -> CaptureOptions:
    """Return the options with `given` settings, and otherwise those of the file that is captured again.

    If the prompts are an expectation, it is that file.

    output: as of `capture_expectation`.
    Raises: UsageError for options of the text of prompts that only the earlier capture read; BrokenExpectationError.
    """
    named = options.prompts
    if isinstance(named, str) and is_expectation(Path(named)):
        file, named = Path(named), None
        earlier: Expectation | None = read_expectation(file)
    else:
        file, earlier = _find_earlier(options, output)
    settings = options.settings if earlier is None else earlier.key.content.settings
    update: dict[str, Any] = {"settings": settings.model_copy(update=dict(given))}
    if earlier is not None and named is None:
        if earlier.prompts and given.keys() & {"prompt_length", "chat"}:
            raise UsageError(f"{file} holds the tokens of your own prompts: name --prompts again")
        prompts = earlier.prompts or None
        update |= {"prompts": prompts, "chats": earlier.chats, "repeats": str(file)}
    return options.model_copy(update=update)


def _find_earlier(options: CaptureOptions, output: Path) -> tuple[Path, Expectation | None]:
    """Return the file that a capture replaces, with its expectation; None for a new or a broken one."""
    for file in [output] if output.suffix == ".json" else sorted(output.glob("*.json")):
        try:
            earlier = read_expectation(file)
        except UnreadableFileError:
            continue
        # In a folder, not one with a name of its own, or of another model or run.
        place = file.stem, earlier.model, earlier.provenance.run
        if file == output or place == (earlier.name, options.model, options.run):
            return file, earlier
    return output, None


def _read_replaced(path: Path, reason: str | None, progress: Progress) -> Expectation | None:
    """Read the file that a capture replaces. Raises: UsageError, without a reason, if it cannot be read."""
    if not path.is_file():
        return None
    try:
        return read_expectation(path)
    except BrokenExpectationError as error:
        if reason is None:
            raise UsageError(
                f"{path}: {error.problem}. To replace it, add --reason TEXT. To restore it:\n  git checkout {path}"
            ) from None
        progress.note(f"{path}: {error.problem}: an approval in it is lost")
        return None


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
    process = provenance()
    del process["num_threads"]  # of this process, which computes nothing
    process["versions"] |= versions_of_encoding()
    origin = expectation.provenance.model_copy(update={"process": process})
    return expectation.model_copy(update={"provenance": origin})


def _require_agreement_with_host(
    options: CaptureOptions, expectation: Expectation, on_host: Distributions | None
) -> None:
    """Raise UsageError if the device is further from the yardstick than the host, without a reason."""
    if options.reason is not None or on_host is None:
        return
    by_host = expectation.signature.model_copy(update={"captured": on_host})
    dtype = expectation.key.machine.dtype
    judged = judge_numbers(by_host, expectation.signature.captured, dtype, limits_of(by_host))
    if not is_within_limits(judged):
        inputs = expectation.options_of_check(options.repeats or "")
        if isinstance(options.prompts, str):
            names = "prompt_length", "batch_size", "max_new_tokens", "chat", "seed"
            inputs = {"prompts": options.prompts} | options.settings.options(*names)
        check = check_command(options.model, options.run, **inputs)
        raise UsageError(
            f"{options.run} cannot be trusted: {describe_worst(judged, f'the error of cpu/{dtype}')}. Nothing was"
            f" written. If the difference is intended, add --reason TEXT. To find the cause:\n  {check}"
        )


def _refuse_hidden_change(
    before: Expectation, expectation: Expectation, path: Path, reason: str | None
) -> None:
    """Raise UsageError if more than noise changed since the replaced expectation, without a reason.

    Otherwise small drifts of several recaptures would add up.
    """
    if reason is not None:
        return
    change = find_change(before, expectation)
    if change.kind != "noise":
        advice = " If the change is intended, add --reason TEXT"
        renamed = model_change(before, expectation)
        if renamed or before.prompts != expectation.prompts:
            advice += f". To keep both, use --output {path.with_name('NAME.json')}"
        differences = "; ".join([change.summary, *renamed])
        raise UsageError(
            f"{path} exists, and the new capture differs from it: {differences}. Nothing was written.{advice}"
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
        problem = seen.problem or seen.missing or "; ".join(seen.stale)
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


def verify_expectations(
    paths: Sequence[Path],
    run: str,
    folder: Path,
    progress: Progress,
    setup: str | None = None,
    allow_unused: Sequence[str] = (),
    model: str | None = None,
) -> Verdict:
    """Verify the expectations in `paths`, by default the shipped ones, and write the verdict.

    setup: FILE.py:FUNC to call with each model before it runs.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    model: folder or name to load instead of the recorded one.
    Raises: UsageError for a path without expectations; for `model`, with files of several models.
    """
    parse_run(run)
    if model is not None:
        resolve_model(model)
    expectations, broken = read_files(paths or [SHIPPED], run)
    broken |= _take_duplicates(expectations)
    names = {one.model for one in expectations.values()}
    if model is not None and len(names) > 1:
        raise UsageError(
            f"--model is for one model, and the files are of {', '.join(sorted(names))}"
        )
    request = VerifyRequest(
        files=[str(file) for file in expectations], run=run, setup=setup, model=model
    )
    if not expectations:  # reading them needs no torch
        nowhere = Machine(vendor="", architecture="", dtype="", precision="")
        here = AllSeen(machine=nowhere, versions={}, seen=[])
        return write_results(*judge_seen(run, [], here, allow_unused, broken), folder)
    (observations,) = call(_OBSERVE, request, folder=folder, name="verify", progress=progress)
    variables = provenance()["variables"]  # of this process, as at the capture: workers add some
    observations = observations.model_copy(update={"variables": variables})
    observations = _with_references(request, observations, folder, progress)
    if setup is not None:
        observations = _with_setups(
            request, [*expectations.values()], observations, folder, progress
        )
    verdict, rows = judge_seen(run, [*expectations.values()], observations, allow_unused, broken)
    return write_results(verdict, rows, folder)


def _with_references(
    request: VerifyRequest, observed: AllSeen, folder: Path, progress: Progress
) -> AllSeen:
    """Add the references of observations, from a process that loads no setup function."""
    sketches = {one.file: one.sketches for one in observed.seen if one.sketches is not None}
    if not sketches:
        return observed
    asked = ReferenceRequest(
        run=request.run,
        model=request.model,
        is_patched=request.setup is not None,
        sketches=sketches,
    )
    (references,) = call(_REFER, asked, folder=folder, name="reference", progress=progress)
    by_file = dict(zip(sketches, references, strict=True))
    seen = [
        one.model_copy(update={"reference": by_file.get(one.file), "sketches": None})
        for one in observed.seen
    ]
    return observed.model_copy(update={"seen": seen})


def _with_setups(
    request: VerifyRequest,
    expectations: Sequence[Expectation],
    observed: AllSeen,
    folder: Path,
    progress: Progress,
) -> AllSeen:
    """Add what the setup function does to the exact outputs of runs that agree in a dtype that may hide it."""
    files = [
        seen.file
        for seen, expectation in zip(observed.seen, expectations, strict=True)
        if may_hide_setup(expectation, seen)
    ]
    if not files:
        return observed
    asked = request.model_copy(update={"files": files})
    (effects,) = call(_SET_UP, asked, folder=folder, name="setup", progress=progress)
    by_file = dict(zip(files, effects, strict=True))
    seen = [one.model_copy(update={"setup_effect": by_file.get(one.file)}) for one in observed.seen]
    return observed.model_copy(update={"seen": seen})


def diff_expectations(expected: str, actual: str, folder: Path) -> str:
    """Judge the capture `actual` by the expectation `expected`, and write the verdict.

    Each is a file, a pipe, or REV:FILE of git.
    Returns: the change, as Markdown.
    """
    before, now = read_side(expected), read_side(actual)
    old, new = (
        side if Path(side).is_file() else name
        for side, name in ((expected, "OLD"), (actual, "NEW"))
    )
    verdict, rows, change = judge_pair(before, now, old, new)
    names = ["a pipe" if Path(side).is_fifo() else Path(side).name for side in (expected, actual)]
    shown = names if names[0] != names[1] else [expected, actual]
    sides = {
        side: {"run": f"{name} ({one.key.machine.dtype})"}
        for side, name, one in zip(("reference", "candidate"), shown, (before, now), strict=True)
    }
    write_results(verdict.model_copy(update=sides), rows, folder)
    return change_as_markdown(before, now, change, new)


def read_side(side: str) -> Expectation:
    """Read an expectation from a file, a pipe as of <(COMMAND), or REV:FILE of git. Raises: UsageError."""
    path = Path(side)
    if path.is_fifo():
        return parse_expectation(read_pipe(path), path, "FILE.json")
    in_git = _IN_GIT.fullmatch(side)
    if path.exists() or in_git is None:
        if not path.exists():
            raise UsageError(
                f"{side}: no such file. A version in git is written REV:FILE, as HEAD:FILE"
            )
        return read_expectation(path)
    revision, name = in_git.groups()
    place = name if name.startswith(("./", "../")) else f"./{name}"
    try:
        done = subprocess.run(
            ["git", "show", f"{revision}:{place}"],  # noqa: S607 - the user's git
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise UsageError(f"{side}: git cannot be run: {error.strerror}") from None
    if done.returncode:
        problem = done.stderr.strip().partition("\n")[0].removeprefix("fatal: ")
        raise UsageError(
            f"{side} is neither a file nor a version in git: {shorten(problem)}. To list the versions:\n"
            f"  git log --oneline -- {shlex.quote(name)}"
        )
    return parse_expectation(done.stdout, side, name)


def read_files(
    paths: Sequence[Path], run: str = "RUN"
) -> tuple[dict[Path, Expectation], dict[str, BrokenExpectationError]]:
    """Read the expectations in `paths`. Returns: those that can be read, and the errors of others, by file.

    Raises: as `find_files`.
    """
    expectations: dict[Path, Expectation] = {}
    broken: dict[str, BrokenExpectationError] = {}
    for file in find_files(paths, run):
        try:
            expectations[file] = read_expectation(file)
        except BrokenExpectationError as error:
            broken[str(file)] = error
    return expectations, broken


# REV:FILE, or :2:FILE for one side of a merge conflict.
_IN_GIT = re.compile(r"(:[0-3]|[^:]*):(.+)")


def find_files(paths: Sequence[Path], run: str = "RUN") -> list[Path]:
    """List the files in `paths` and in its folders. run: for the command that captures one.

    Raises: UsageError for a missing path, or a folder without expectations.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        capture = assay_command("expect", "capture", "MODEL", run=run, output=path)
        steps = [NextStep("To capture one", capture)]
        if not path.exists():
            if run_git("ls-files", "--error-unmatch", "--", str(path)) is not None:
                checkout = f"git checkout {shlex.quote(str(path))}"
                steps.insert(0, NextStep("To restore a deleted one", checkout))
            near = did_you_mean(str(path), map(str, path.parent.glob("*")))
            why = f"no such file or folder{f'; {near}' if near else '.'}"
            raise UsageError(f"{path}: {why} {list_steps(*steps)}")
        if not inside or not inside[0].is_file():
            raise UsageError(f"{path} has no expectation. {list_steps(*steps)}")
        found += inside
    return found


def _take_duplicates(expectations: dict[Path, Expectation]) -> dict[str, BrokenExpectationError]:
    """Take files of one key out, except one; the one that the key names, if it is there. Returns: their errors."""
    known: dict[str, Path] = {}
    found: dict[str, BrokenExpectationError] = {}
    by_name = sorted(expectations, key=lambda file: file.stem != expectations[file].name)
    for file in by_name:
        key = expectations[file].model + expectations[file].key.model_dump_json()
        first = known.setdefault(key, file)
        if first is not file:
            problem = f"it is for the same model, inputs and machine as {first}, which is verified"
            remove = f"git rm {shlex.quote(str(file))}"
            delete = NextStep("delete one of the two, for example", remove)
            found[str(file)] = BrokenExpectationError.explained(file, problem, delete)
            del expectations[file]
    return found
