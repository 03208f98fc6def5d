"""`assay check generate`: run both sides in processes, judge, and write the verdict.

Also `assay calibrate`, which checks correct models.
"""

import importlib
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from assay.devices.detection import require_run
from assay.devices.run_string import Run, parse_run
from assay.errors import AssayError, UsageError, assay_command
from assay.generate.spec import (
    PRELOAD,
    CandidateOptions,
    CandidateReport,
    GenerateCheck,
    GoldenSpec,
    InputOptions,
)
from assay.inputs import parse_lengths, read_prompts
from assay.judge.limits import CleanRun, largest_ratios, load_limits
from assay.launch import (
    FORK_SERVER,
    RemoteFunction,
    call,
    require_candidate_python,
    world_of,
)
from assay.plugins import find_plugin_file
from assay.runs import Progress
from assay.runs.provenance import changed_packages, describe_packages, provenance
from assay.runs.results import (
    HERE_FOLDER,
    VERDICT_FILE,
    rank_folder,
    read_measurements,
    remove_recordings,
    write_results,
    write_verdict,
)
from assay.sites import CallSite
from assay.verdicts import Outcome, Verdict

if TYPE_CHECKING:
    from assay.generate.golden import GoldenManifest
    from assay.generate.judging import Judgement
    from assay.judge.code_changes import CodeChange
    from assay.judge.levels import LevelResult

_GOLDEN: "RemoteFunction[GoldenSpec, GoldenManifest]" = RemoteFunction(
    "assay.generate.capture:capture_golden", PRELOAD
)
_EARLY: "RemoteFunction[GenerateCheck, None]" = RemoteFunction(
    "assay.generate.candidate:check_candidate", PRELOAD
)
_DRIFT: "RemoteFunction[GenerateCheck, list[CodeChange]]" = RemoteFunction(
    "assay.generate.drift:measure_drift", PRELOAD
)
_ORIGINAL: "RemoteFunction[GenerateCheck, dict[str, LevelResult]]" = RemoteFunction(
    "assay.generate.original:compare_with_original", PRELOAD
)
_QUANTIZED: "RemoteFunction[GenerateCheck, None]" = RemoteFunction(
    "assay.generate.original:require_quantized", PRELOAD
)
_CANDIDATE: RemoteFunction[GenerateCheck, CandidateReport] = RemoteFunction(
    "assay.generate.candidate:run_candidate", PRELOAD
)

# Of `assay calibrate`.
MODELS = ("micro:llama", "micro:mistral", "micro:gemma2", "micro:mixtral")

_TEXT_LEVELS = ("tokens", "logits", "sampler")


def capture(spec: GoldenSpec, folder: Path, progress: Progress) -> "GoldenManifest":
    """Capture a golden in its own process, whose log goes to `folder`."""
    require_run(spec.reference)
    _require_readable(spec.inputs)
    return call(_GOLDEN, spec, folder=folder, name="reference", progress=progress)[0]


def _require_readable(inputs: InputOptions) -> None:
    """Raise UsageError, before a model is loaded, for prompts and lengths that no model could take."""
    if inputs.prompts is not None:
        read_prompts(Path(inputs.prompts))
    elif inputs.chat:
        raise UsageError("--chat is for the texts of --prompts FILE.jsonl")
    if inputs.prompt_length:
        parse_lengths(inputs.prompt_length)


def _require_sides(check: GenerateCheck) -> None:
    """Raise an error unless both sides can run, each with its own packages if they have two Pythons."""
    if check.python is not None:  # it may have a device that this environment cannot use
        require_candidate_python(check.python, check.golden)
    for run in (check.reference, None if check.python else check.candidate):
        if run is not None:
            require_run(run)


def check_generate(check: GenerateCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    check = replace(check, folder=folder)
    load_limits(check.limits)
    CandidateOptions.parse(check.options)
    _require_readable(check.inputs)
    if check.setup is not None:
        find_plugin_file(check.setup)
    if check.golden is not None and not check.golden.is_dir():
        trusted, golden = check.reference or "RUN", check.golden
        capture = assay_command(
            "capture", check.model, run=trusted, noise_for=check.dtype, output=golden
        )
        raise UsageError(f"{golden} does not exist. Capture it first: {capture}")
    FORK_SERVER.preload(PRELOAD)
    if check.original is not None:  # before anything is computed
        call(_QUANTIZED, check, folder=folder, name="original", progress=progress)
    with progress.step("looking for devices"):
        _require_sides(check)
    _import_meanwhile("assay.generate.judging", "assay.report.page.html")
    if check.golden is None:
        if check.setup is not None or check.options or check.num_ranks > 1:
            # In its own process, as it may patch globals; a mistake costs no reference run.
            call(
                _EARLY,
                check,
                folder=folder,
                name="candidate-setup",
                progress=progress,
                python=check.python,
            )
        capture_for(check, progress)
    elif check.verify_golden:
        from assay.generate.golden import verify_golden  # torch

        with progress.step("verifying the golden"):
            verify_golden(check.golden, check.dtype)
    judgement = _run_and_judge(check, progress)
    judgement, check = _explain_golden(judgement, check, progress)
    # Written before the follow-up, so that the verdict exists if the follow-up fails.
    verdict = write_results(judgement.verdict, judgement.measurements, folder, check.command)
    if judgement.origin is not None:
        judgement = _follow_up(judgement, check, progress)
        verdict = write_verdict(judgement.verdict, folder, check.command)
    remove_recordings(folder, check.keep)
    return verdict


def _import_meanwhile(*modules: str) -> None:
    """Import in a thread, while other processes run, what this process needs after them."""

    def import_all() -> None:
        # An ImportError is raised again at the first use.
        with suppress(ImportError):
            for module in modules:
                importlib.import_module(module)

    threading.Thread(target=import_all, daemon=True).start()


def capture_for(check: GenerateCheck, progress: Progress) -> None:
    """Capture the golden that a check with a reference needs, in its folder."""
    if check.reference is None:
        raise UsageError("a check needs --reference RUN or --golden TRACE")
    spec = GoldenSpec(
        model=check.model,
        reference=check.reference,
        noise_for=[check.dtype],
        inputs=check.inputs,
        level="module" if check.level == "modules" else "logits",
        folder=check.golden_folder,
        max_disk=check.max_disk,
        max_memory=check.max_memory,
        max_seconds=check.max_seconds,
        remote_code=check.remote_code,
    )
    call(_GOLDEN, spec, folder=check.folder, name="reference", progress=progress)


def _explain_golden(
    judgement: "Judgement", check: GenerateCheck, progress: Progress
) -> "tuple[Judgement, GenerateCheck]":
    """Name what changed since the golden: settings of the model, or the environment.

    Where packages changed, a failed candidate is checked against a reference of this environment.

    Returns: the judgement that holds, and the check that it is of.
    """
    if check.golden is None:
        return judgement, check
    from assay.generate.drift import is_rounding  # torch
    from assay.generate.golden import read_golden, renewal_command
    from assay.judge.code_changes import describe_changes
    from assay.judge.wording import describe_rounding
    from assay.models.config_files import describe_setting_changes, record_settings

    golden = read_golden(check.golden_folder)
    now = record_settings(check.model, check.remote_code)
    renewal = renewal_command(golden.model_dump(by_alias=True))
    if settings := describe_setting_changes(golden.settings, now):
        judgement = judgement.with_note(f"{settings} capture the golden again: {renewal}")
    packages = describe_packages(changed_packages(golden.environment, provenance()))
    if not packages or judgement.verdict.verdict is not Outcome.FAIL:
        return judgement, check
    reference = parse_run(golden.reference["run"])
    folder = check.folder / HERE_FOLDER
    here = replace(check, folder=folder, golden=None, reference=reference, inputs=golden.inputs)
    try:
        require_run(reference)
        folder.mkdir()
        (changes,) = call(_DRIFT, check, folder=check.folder, name="drift", progress=progress)
        capture_for(here, progress)
        own = _run_and_judge(here, progress)
    except AssayError as error:
        rmtree(folder, ignore_errors=True)
        why = f"the golden is of another environment ({packages}), which is not explained: {error}"
        return judgement.with_note(why), check
    code = f"the model's code changed ({packages}): {describe_changes(changes)}"
    if own.verdict.verdict is Outcome.FAIL:
        note = f"the candidate fails against a reference of this environment as well ({packages})"
        own = own.with_note(note)
        return (own.with_note(f"besides, {code}") if changes else own), here
    agrees = "the candidate agrees with a reference of this environment"
    if not changes and is_rounding(judgement.measurements):
        note = (
            f"the exact values are those of the golden, and {agrees}; {describe_rounding(packages)}. Capture the golden"
            f" again: {renewal}"
        )
        return own.with_note(note), here
    rmtree(folder)  # it holds what decided, or nothing
    judge_here = assay_command(
        *("check", "generate", check.model),
        reference=reference,
        candidate=check.candidate,
        candidate_setup=check.setup,
        candidate_python=check.python or sys.executable,
    )
    note = (
        f"{code}; {agrees}. If the change is intended, capture the golden again: {renewal}"
        if changes
        else f"undecided: the exact values are those of the golden, and {agrees}, but the error is larger than another"
        f" rounding explains ({packages}). A fault that both share here agrees as well. To find it, in a new environment"
        f" with the versions of the golden, not this one: {judge_here}"
    )
    return judgement.with_note(note), check


def _run_and_judge(check: GenerateCheck, progress: Progress) -> "Judgement":
    """Run the candidate in one process or on its ranks, and judge it."""
    results = check.candidate_folder
    original: dict[str, LevelResult] = {}
    if check.original is not None:
        (original,) = call(
            _ORIGINAL, check, folder=check.folder, name="original", progress=progress
        )
    world, name = world_of(check.mesh, check.candidate.device), results.name
    try:
        reports = call(
            _CANDIDATE,
            check,
            world=world,
            folder=check.folder,
            name=name,
            progress=progress,
            python=check.python,
        )
    except AssayError:
        if check.golden is None:
            kept = check.golden_folder.parent
            progress.note(f"the reference is kept: --golden {kept} reads it again")
        raise
    from assay.generate.judging import merge_weight_facts, worst_of_ranks  # torch

    with progress.step("judging"):
        if len(reports) == 1:
            return _judge(check, results, reports[0], original)
        return worst_of_ranks(
            [
                _judge(check, rank_folder(results, number), report, original)
                for number, report in enumerate(merge_weight_facts(reports))
            ]
        )


def _judge(
    check: GenerateCheck, results: Path, report: CandidateReport, original: "dict[str, LevelResult]"
) -> "Judgement":
    """Judge the `results` and `report` of one process."""
    from assay.generate.golden import GenerateEvidence, GoldenSection  # torch
    from assay.generate.judging import judge_generation
    from assay.models.load import chosen_threads
    from assay.trace import Trace

    section = GoldenSection.open(check.golden_folder, check.dtype)
    with chosen_threads(section.golden.model.num_parameters):
        evidence = GenerateEvidence(check, section, Trace.open(results), report, original)
        return judge_generation(evidence)


def _follow_up(judgement: "Judgement", check: GenerateCheck, progress: Progress) -> "Judgement":
    """Test a failure for a mere change of representation, and find the operation.

    Returns: the judgement after it, or with a note if it cannot run.
    """
    from assay.generate.find_operation import find_operation  # torch
    from assay.generate.float64_rerun import pass_if_representation

    levels = judgement.verdict.levels
    same_text = all(levels[name].verdict in (None, Outcome.PASS) for name in _TEXT_LEVELS)
    # It needs the whole model in one process.
    if check.setup is not None and check.num_ranks == 1 and same_text:
        try:
            judgement = pass_if_representation(judgement, check, progress)
        except AssayError as error:
            judgement = judgement.with_note(f"not run in float64: {error}")
    if judgement.origin is None or judgement.call is None:
        return judgement
    batch, step = judgement.call
    site = CallSite(step, judgement.origin.stage.module, micro_batch=batch)
    try:
        operation = find_operation(check, site, progress)
    except AssayError as error:
        # This machine may lack the device of a golden from elsewhere.
        return judgement.with_note(f"no operation is named: {error}")
    return judgement if operation is None else judgement.with_operation(operation)


def run_clean(
    runs: Sequence[Run], models: Sequence[str], reference: Run, folder: Path, progress: Progress
) -> list[CleanRun]:
    """Check every model on every run, which must be correct, and keep the largest ratios.

    Raises: UsageError if a run has something that cannot be compared, or an exact difference.
    """
    clean = []
    for model in models:
        goldens: dict[str, Path] = {}
        for run in runs:
            name = f"{model} {run}".replace("/", "-").replace(":", "-").replace(" ", "-")
            if run.dtype not in goldens:
                golden = goldens[run.dtype] = folder / f"{name}-golden"
                golden.mkdir()
                spec = GoldenSpec(
                    model=model, reference=reference, noise_for=[run.dtype], folder=golden
                )
                capture(spec, golden, progress)
            part = folder / name
            part.mkdir()
            check = GenerateCheck(model=model, candidate=run, golden=goldens[run.dtype])
            verdict = check_generate(check, part, progress)
            if not _is_clean(verdict):
                raise UsageError(f"{model} on {run} is not a clean run: see {part / VERDICT_FILE}")
            rows, complaints = read_measurements(part)
            if complaints:
                raise UsageError(f"{part}: {complaints[0]}")
            clean.append(CleanRun(f"{model} {run}", largest_ratios(rows)))
    return clean


def _is_clean(verdict: Verdict) -> bool:
    """Return True if everything agrees that must agree exactly."""
    exact = ("inputs", "tokens", "sampler")
    return (
        not any(item.limit == 0 for item in verdict.suspects)
        and not verdict.unmatched.expected
        and verdict.diagnosis != "non-finite"
        and all(verdict.levels[name].verdict in (None, Outcome.PASS) for name in exact)
    )
