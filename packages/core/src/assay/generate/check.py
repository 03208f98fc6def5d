"""`assay check generate`: run both sides in processes, judge, and write the verdict."""

import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.comparing.limits import load_limits
from assay.devices.detection.isolation import require_run
from assay.errors import UsageError
from assay.generate.processes.options import CandidateOptions
from assay.generate.processes.requests import (
    CandidateReport,
    CandidateRequest,
    GenerateCheck,
    GoldenRequest,
    InputOptions,
    SetupRequest,
)
from assay.generate.processes.worker import PRELOAD, ask, run_ranks
from assay.inputs import parse_lengths, read_prompts
from assay.plugins import find_plugin_file
from assay.runs import Answer, Progress
from assay.runs.results import (
    CANDIDATE_FOLDER,
    GOLDEN_FOLDER,
    rank_folder,
    write_results,
    write_verdict,
)
from assay.sites import recorded_for
from assay.verdicts import Verdict

if TYPE_CHECKING:
    from assay.generate.judging.verdict import Judgement


def capture(request: GoldenRequest, folder: Path, progress: Progress) -> Answer:
    """Capture a golden in its own process, whose log goes to `folder`."""
    require_run(request.reference)
    _require_readable(request.inputs)
    return ask("capture", request, "reference", folder, progress)


def _require_readable(inputs: InputOptions) -> None:
    """Raise UsageError, before a model is loaded, for prompts and lengths that no model could take."""
    if inputs.prompts is not None:
        read_prompts(Path(inputs.prompts))
    if inputs.prompt_length:
        parse_lengths(inputs.prompt_length)


def check_generate(check: GenerateCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    from assay.runs.forking import begin_preload  # slow for --help

    load_limits(check.limits)
    CandidateOptions.parse(check.options)
    _require_readable(check.inputs)
    if check.setup is not None:
        find_plugin_file(check.setup)
    if check.golden is not None and not check.golden.is_dir():
        raise UsageError(f"there is no folder {check.golden}")
    begin_preload(PRELOAD)
    with progress.step("looks for the devices"):  # before anything is computed
        for run in (check.reference, check.candidate):
            if run is not None:
                require_run(run)
    _import_meanwhile("assay.generate.judging.verdict", "assay.report.publish")
    if check.setup is not None and check.golden is None:
        # In its own process, as it may patch globals; a typo costs no reference run.
        ask("setup", SetupRequest(setup=check.setup), "candidate-setup", folder, progress)
    if check.golden is not None and check.verify_golden:
        from assay.generate.processes.golden_folder import verify_golden  # torch

        with progress.step("verifies the golden"):
            verify_golden(check.golden, check.dtype)
    golden = check.golden or _capture_golden(check, folder, progress)
    candidate = CandidateRequest(
        model=check.model,
        candidate=check.candidate,
        golden=str(golden),
        folder=str(folder / CANDIDATE_FOLDER),
        setup=check.setup,
        level=check.level,
        options=check.options,
        mesh={} if check.num_ranks == 1 else dict(check.mesh),
        inputs=check.inputs.model_dump(include=set(check.given)) if check.golden else {},
        remote_code=check.remote_code,
    )
    judgement = _run_and_judge(golden, check, candidate, folder, progress)
    # Written before the follow-up, so that the verdict exists if the follow-up fails.
    verdict = write_results(judgement.verdict, judgement.measurements, folder, check.command)
    # The follow-up needs the whole model in one process.
    if judgement.origin is not None and check.num_ranks == 1:
        from assay.generate.followup import follow_up  # torch

        judgement = follow_up(judgement, check, candidate, folder, progress)
        verdict = write_verdict(judgement.verdict, folder, check.command)
    return verdict


def _import_meanwhile(*modules: str) -> None:
    """Import in a thread, while other processes run, what this process needs after them.

    Does nothing if torch is imported: the caller may have models, which gc.freeze would keep alive.
    """
    from assay.runs.forking import import_to_stay

    if "torch" in sys.modules:
        return

    def import_all() -> None:
        # An ImportError is raised again at the first use.
        with suppress(ImportError):
            import_to_stay(*modules)

    threading.Thread(target=import_all, daemon=True).start()


def _capture_golden(check: GenerateCheck, folder: Path, progress: Progress) -> Path:
    if check.reference is None:
        raise UsageError("a check needs --reference RUN or --golden TRACE")
    golden = folder / GOLDEN_FOLDER
    request = GoldenRequest(
        model=check.model,
        reference=check.reference,
        noise_for=[check.dtype],
        inputs=check.inputs,
        level=recorded_for(check.level),
        folder=str(golden),
        remote_code=check.remote_code,
    )
    ask("capture", request, "reference", folder, progress)
    return golden


def _run_and_judge(
    golden: Path,
    check: GenerateCheck,
    candidate: CandidateRequest,
    folder: Path,
    progress: Progress,
) -> "Judgement":
    """Run the candidate in one process or on its ranks, and judge it."""
    results = Path(candidate.folder)
    if check.num_ranks == 1:
        answer = ask("candidate", candidate, "candidate", folder, progress)
        with progress.step("judges"):
            return _judge(golden, check, results, answer.result)
    axes = ", ".join(f"{axis}={size}" for axis, size in check.mesh.items())
    with progress.step(f"candidate on ranks of {axes}"):
        reports = run_ranks(candidate, progress)
    from assay.generate.judging.verdict import merge_weight_facts, worst_of_ranks  # torch

    with progress.step("judges"):
        return worst_of_ranks(
            [
                _judge(golden, check, rank_folder(results, number), report)
                for number, report in enumerate(merge_weight_facts(reports))
            ]
        )


def _judge(
    golden: Path, check: GenerateCheck, results: Path, report: Mapping[str, Any]
) -> "Judgement":
    """Judge the `results` and `report` of one process."""
    from assay.generate.judging.evidence import GenerateEvidence  # torch is not needed for --help
    from assay.generate.judging.verdict import judge_generation
    from assay.generate.processes.golden_folder import GoldenSection, read_golden
    from assay.models.size import chosen_threads
    from assay.trace import Trace

    evidence = GenerateEvidence(
        read_golden(golden),
        GoldenSection.open(golden, check.dtype),
        Trace.open(results),
        CandidateReport.model_validate(report),
        load_limits(check.limits),
        check.level,
        check.allow_unused,
    )
    with chosen_threads(evidence.golden.model.num_parameters):
        return judge_generation(evidence)
