"""Runs both sides of `assay check train` in processes, judges, and writes the verdict.

Importing it imports no torch.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from assay.devices.detection import require_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError, UsageError
from assay.files import describe_invalid, read_sealed, write_sealed
from assay.judge.limits import Limits, load_limits
from assay.launch import (
    RemoteFunction,
    call,
    require_candidate_python,
    world_of,
)
from assay.option_ranges import LARGEST_SEED, require_count
from assay.plugins import find_plugin_file
from assay.runs import Progress, changed_packages, describe_packages, provenance
from assay.runs.results import (
    CANDIDATE_FOLDER,
    GOLDEN_FOLDER,
    rank_folder,
    remove_recordings,
    write_results,
)
from assay.training.protocol import (
    ADAMW_EPS,
    MIXED_PRECISION,
    OF_NAMED_PIPELINES,
    PACKED,
    Shapes,
    can_keep_moments,
)
from assay.training.reports import (
    TRAINING_LIMITS,
    RecordedPlan,
    ReferenceReport,
    TrainCheck,
    TrainerReport,
    TrainOptions,
    scaled_folder,
)
from assay.verdicts import Measurement, Outcome, Record, Verdict

if TYPE_CHECKING:
    from assay.judge.code_changes import CodeChange
    from assay.training.judging.evidence import TrainEvidence


# The fork server imports these once for all processes of a check.
PRELOAD = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by most decoders
    "assay.training.processes.candidate",
)

USER_CODE: RemoteFunction[TrainCheck, tuple[Shapes, dict[str, Any]]] = RemoteFunction(
    "assay.training.processes.candidate:load_user_code", PRELOAD
)
REFERENCE: RemoteFunction[TrainCheck, ReferenceReport] = RemoteFunction(
    "assay.training.processes.reference:record_reference", PRELOAD
)
CANDIDATE: RemoteFunction[TrainCheck, TrainerReport] = RemoteFunction(
    "assay.training.processes.candidate:run_candidate", PRELOAD
)
_CHANGES: "RemoteFunction[TrainCheck, list[CodeChange]]" = RemoteFunction(
    "assay.training.processes.reference:find_code_changes", PRELOAD
)


# The report of the trusted process in a golden.
REPORT_FILE = "report.json"

Report = TypeVar("Report", bound=Record)
Result = TypeVar("Result")

# One step before the checkpoint, and one after it.
FEWEST_STEPS = 2


def check_train(check: TrainCheck, folder: Path, progress: Progress) -> Verdict:
    """Run both sides, judge, and write verdict.json and measurements.jsonl into `folder`."""
    load_training_limits(check.limits)
    with progress.step("looking for devices"):
        check_consistency(check)
    golden = check.recorded or folder / GOLDEN_FOLDER
    check = with_user_code(check, folder, progress)
    if check.recorded is None:
        record_golden(check, golden, progress)
    else:
        require_recorded_plan(check, golden)
    verdict = check_candidate(check, golden, folder, progress)
    remove_recordings(folder, check.keep)
    return verdict


def with_user_code(check: TrainCheck, folder: Path, progress: Progress) -> TrainCheck:
    """Load trainer and setup function in a separate process, before the reference runs.

    Returns: the check with the options that both sides then have.
    Raises: UsageError for code that a candidate could not run, and for a plan of wrong types.
    """
    from assay.training.trainers.registry import NAMED  # torch is not needed for --help

    trainer = None if check.trainer in NAMED else check.trainer
    shapes: Shapes = OF_NAMED_PIPELINES
    stated: dict[str, Any] = {}
    if trainer is not None or check.setup is not None:
        request = replace(check, trainer=trainer)
        code = call(
            USER_CODE,
            request,
            folder=folder,
            name="setup" if trainer is None else "trainer",
            progress=progress,
            python=check.python,
        )
        ((shapes, stated),) = code
    options = options_for(check.options, check.mesh, check.features, shapes)
    try:
        options = TrainOptions.model_validate(options.model_dump() | stated)
    except ValidationError as error:
        problem = describe_invalid(error, TrainOptions)
        raise UsageError(f"stated_plan of {check.trainer}: {problem}") from error
    return replace(check, options=options)


def record_golden(check: TrainCheck, golden: Path, progress: Progress) -> None:
    """Train yardstick and noise run in a separate process, and record them in `golden`."""
    record_report(REFERENCE, "reference", check, golden, progress)


def record_report(
    function: RemoteFunction[TrainCheck, Report],
    name: str,
    check: TrainCheck,
    golden: Path,
    progress: Progress,
) -> None:
    """Have the trusted process, called `name`, call `function`, and write its report into `golden`."""
    golden.mkdir(parents=True, exist_ok=True)
    request = replace(check, golden=golden, folder=golden)
    (report,) = call(function, request, folder=golden.parent, name=name, progress=progress)
    write_sealed(golden / REPORT_FILE, report)


def read_plan(golden: Path) -> RecordedPlan:
    """Read the plan of an earlier check's golden. Raises: UsageError if no other check can use it."""
    if not (golden / REPORT_FILE).is_file():
        raise UsageError(
            f"{golden} holds no golden of `assay check train`: give the folder of a check that kept its golden"
        )
    plan = read_sealed(ReferenceReport, golden / REPORT_FILE).plan
    if plan is None:
        raise UsageError(f"{golden} does not hold its plan: record it again with --reference RUN")
    return plan


def require_recorded_plan(check: TrainCheck, golden: Path) -> None:
    """Raise UsageError if the candidate trains by another plan than the golden's."""
    plan = read_plan(golden)
    if plan.dtype != check.dtype:
        raise UsageError(
            f"{golden} was recorded for candidates in {plan.dtype}, not {check.dtype}: each dtype has its own noise"
        )
    # Without LoRA nothing reads the adapter's dropout.
    unused = {"model", "resume_at", "remote_code"} | (
        set() if plan.options.lora else {"adapter_dropout"}
    )
    then, now = (one.model_dump(exclude=unused) for one in (plan.options, check.options))
    changed = [f"{name} {then[name]}, here {now[name]}" for name in then if now[name] != then[name]]
    if changed:
        raise UsageError(
            f"{golden} was recorded for another plan: {'; '.join(changed)}. Leave these options out, or record a golden"
            " for this plan with --reference RUN"
        )


def check_candidate(check: TrainCheck, golden: Path, folder: Path, progress: Progress) -> Verdict:
    """Run the candidate against a recorded golden, judge, and write both files."""
    reports = ask_candidate(CANDIDATE, "candidate", check, golden, folder, progress)
    with progress.step("judging"):
        verdict, measurements = _judge(check, golden, folder, reports)
    if check.recorded is not None:
        age = _explain_age(verdict.verdict, check, golden, folder, progress)
        verdict = verdict.model_copy(update={"notes": [*verdict.notes, *age]})
    return write_results(verdict, measurements, folder, check.command)


def ask_candidate(
    function: RemoteFunction[TrainCheck, Result],
    name: str,
    check: TrainCheck,
    golden: Path,
    folder: Path,
    progress: Progress,
) -> list[Result]:
    """Have the candidate's process, called `name`, or all its ranks, call `function`, and write below `folder`.

    Returns: the reports by rank.
    """
    own = folder / CANDIDATE_FOLDER
    trainer = check.trainer or trainer_for(check.mesh)
    request = replace(check, golden=golden, folder=own, trainer=trainer)
    world = world_of(check.mesh, parse_run(check.candidate).device)
    return call(
        function,
        request,
        world=world,
        folder=folder,
        name=name,
        progress=progress,
        python=check.python,
    )


def options_for(
    options: TrainOptions,
    mesh: Mapping[str, int],
    features: Collection[str] = (),
    pipeline_shapes: Shapes = OF_NAMED_PIPELINES,
) -> TrainOptions:
    """Adapt the options of both sides to the candidate's mesh and features.

    Ranks and packed rows draw other dropout masks than the reference. Without dropout, the losses of
    the free run are comparable.

    pipeline_shapes: micro-batch shapes that the trainer's pipelines accept.
    """
    update: dict[str, Any] = {}
    if prod(mesh.values()) > 1 or PACKED in features:
        update["adapter_dropout"] = 0.0
    if MIXED_PRECISION in features:
        update["mixed_precision"] = True
    if mesh.get("pp", 1) > 1:
        update["shapes"] = pipeline_shapes
    return options.model_copy(update=update)


def trainer_for(mesh: Mapping[str, int]) -> str:
    """Return the name of the trainer that supports the axes of `mesh`."""
    if mesh.get("pp", 1) > 1:
        return "pipeline"
    return "tensor-parallel" if mesh.get("tp", 1) > 1 else "reference"


def load_training_limits(name: str) -> Limits:
    """Load limits; those called `training` extend and widen the limits of the forward pass."""
    limits = load_limits(name)
    if name != TRAINING_LIMITS:
        return limits
    widened = dict(load_limits().by_statistic)
    for statistic, limit in limits.by_statistic.items():
        widened[statistic] = max(limit, widened.get(statistic, 0.0))
    return Limits(name, limits.origin, widened)


def check_consistency(check: TrainCheck) -> None:
    """Raise UsageError, before anything is computed, for options that cannot be checked."""
    options = check.options
    if options.steps < FEWEST_STEPS:
        raise UsageError(
            f"--steps {options.steps}: a run that is resumed needs at least {FEWEST_STEPS}"
        )
    require_count("--steps", options.steps)
    require_count("--micro-batches", options.micro_batches)
    require_count("--seed", options.seed, -LARGEST_SEED, LARGEST_SEED)
    if not 0 < options.learning_rate < math.inf:
        raise UsageError(f"--learning-rate {options.learning_rate}: nothing would be learned")
    if not 1 <= options.resume_at < options.steps:
        raise UsageError(
            f"--resume-at {options.resume_at}: a run of {options.steps} steps can be resumed after"
            f" 1 to {options.steps - 1} of them"
        )
    num_ranks, num_stages = check.mesh.get("dp", 1), check.mesh.get("pp", 1)
    if options.micro_batches < num_ranks * num_stages:
        stages = f"{num_stages} stages on each of " if num_stages > 1 else ""
        raise UsageError(
            f"--micro-batches {options.micro_batches}: {stages}{num_ranks} ranks of dp need at"
            f" least {num_ranks * num_stages}"
        )
    if options.micro_batches % num_ranks:
        raise UsageError(
            f"--micro-batches {options.micro_batches}: {num_ranks} ranks of dp cannot share out"
            f" {options.micro_batches} micro-batches evenly"
        )
    _require_files(check)
    if check.recorded is None:
        require_run(parse_run(check.reference))
    if check.python is None:
        require_run(parse_run(check.candidate))
    else:  # it may have a device that this environment cannot use
        require_candidate_python(check.python, check.recorded)
    if not can_keep_moments(check.dtype) and MIXED_PRECISION not in check.features:
        raise UsageError(
            f"--candidate {check.candidate}: {check.dtype} has no eps of {ADAMW_EPS:g}, which keeps AdamW"
            " from dividing by zero: use --mixed-precision, which keeps weights and moments in float32"
        )


def _require_files(check: TrainCheck) -> None:
    from assay.training.trainers.registry import require_trainer  # torch is not needed for --help

    require_trainer(check.trainer)
    if check.setup is not None:
        find_plugin_file(check.setup)


def _judge(
    check: TrainCheck, golden: Path, folder: Path, reports: "list[TrainerReport]"
) -> tuple[Verdict, list[Measurement]]:
    from assay.trace import Trace  # torch is not needed for --help
    from assay.training.judging.evidence import TrainEvidence
    from assay.training.judging.verdict import judge_training
    from assay.training.processes.reference import measure_adamw
    from assay.training.replay.step_values import RunRows

    candidate = folder / CANDIDATE_FOLDER
    folders = (
        [candidate]
        if len(reports) == 1
        else [rank_folder(candidate, number) for number in range(len(reports))]
    )
    traces = [Trace.open(one) for one in folders]
    scaled = [
        Trace.open(scaled_folder(one))
        for one, report in zip(folders, reports, strict=True)
        if report.replay.scaled_steps
    ]
    reference = read_sealed(ReferenceReport, golden / REPORT_FILE)
    if check.recorded is not None:
        reference = reference.model_copy(update={"notes": [*reference.notes, *_age_of(reference)]})
    rows = RunRows.of_counts(reference.num_rows)
    evidence = TrainEvidence(
        check.options,
        check.dtype,
        reference,
        reports,
        load_training_limits(check.limits),
        noise=Trace.open(golden / "noise"),
        candidates=traces,
        scaled=scaled,
        allow_unused=check.allow_unused,
        # Once: a run with a loss scale is judged twice.
        measure_adamw=cache(partial(measure_adamw, golden, check.options, rows, check.dtype)),
    )
    _refuse_other_masks(evidence)
    return judge_training(evidence)


def _age_of(reference: ReferenceReport) -> Iterator[str]:
    """Name the packages that have changed since a golden was recorded."""
    then = {} if reference.plan is None else reference.plan.environment
    if changed := changed_packages(then, provenance()):
        yield f"the golden was recorded with other packages: {describe_packages(changed)}"


def _explain_age(
    outcome: Outcome, check: TrainCheck, golden: Path, folder: Path, progress: Progress
) -> Iterator[str]:
    """Name changed settings of the model, and of a FAIL, by a replay here, the code that changed with the packages."""
    from assay.judge.code_changes import describe_changes  # torch is not needed for --help
    from assay.models.config_files import describe_setting_changes, record_settings

    plan = read_plan(golden)
    now = record_settings(check.options.model, check.options.remote_code)
    if settings := describe_setting_changes(plan.settings, now):
        yield f"{settings} record a golden here: --reference {plan.reference}"
    if outcome is not Outcome.FAIL or not changed_packages(plan.environment, provenance()):
        return
    request = replace(check, golden=golden, folder=folder, reference=plan.reference)
    try:
        (changes,) = call(_CHANGES, request, folder=folder, name="drift", progress=progress)
    except AssayError as error:
        yield f"whether the model's code changed since the golden is not known: {error}"
        return
    if changes:
        found = f"the model's code changed since the golden: {describe_changes(changes)}. If that is intended"
    else:
        found = (
            "the model's code computes the golden's exact values here, so a library rounds differently or the candidate"
            " is wrong. To decide"
        )
    yield f"{found}, record a golden here: --reference {plan.reference}"


def _refuse_other_masks(evidence: "TrainEvidence") -> None:
    """Raise UsageError if packing changes the candidate's dropout masks."""
    if evidence.reference.draws and any(report.replay.packed for report in evidence.reports):
        raise UsageError(
            "the candidate runs micro-batches as one, and dropout draws other masks for them: set the"
            " model's dropout to 0, and ask for the adapter's without it by --packed"
        )
