"""`assay.check_train`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated

from assay.api import options
from assay.api.options import Option, command_line, run_and_publish, seconds_of_timeout
from assay.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from assay.api.verdict import CheckedVerdict
    from assay.training.processes.requests import TrainOptions


def check_train(  # noqa: PLR0913 - one for each option
    model: options.Model,
    *,
    reference: Annotated[str, options.Reference],
    candidate: options.Candidate,
    candidate_trainer: Annotated[
        str | None,
        Option(
            "reference, ddp, fsdp, tensor-parallel, pipeline; default: what fits the mesh.",
            "NAME|FILE.py:CLASS",
        ),
    ] = None,
    candidate_setup: Annotated[
        "str | Callable[[nn.Module], nn.Module | None] | None",
        Option("Called with the candidate's model before LoRA.", "FILE.py:FUNC"),
    ] = None,
    candidate_model: "nn.Module | Callable[[], nn.Module] | None" = None,
    steps: Annotated[int | None, Option("Optimizer steps; default: 3.")] = None,
    resume_at: Annotated[
        int | None,
        Option("Steps before the checkpoint from which training is resumed; default: 2."),
    ] = None,
    overfit: Annotated[
        bool, Option("Only: does it memorize a few sequences, as it should?")
    ] = False,
    overfit_steps: Annotated[
        int | None, Option("Steps of --overfit; default: 120, with --lora 160.", "N")
    ] = None,
    learning_rate: Annotated[
        float | None, Option("Default: 0.001; with --overfit and --lora 0.01.")
    ] = None,
    track: Annotated[
        str | None, Option("Where the curves of --overfit go as well.", "tensorboard|wandb")
    ] = None,
    micro_batches: Annotated[
        int | None,
        Option("Micro-batches of each step, of unequal token counts; default: 2, or dp times pp."),
    ] = None,
    mesh: Annotated[
        str | None, Option("Ranks of the candidate by axis: dp, tp, pp.", "dp=2,tp=2")
    ] = None,
    world: Annotated[int | None, Option("Ranks; without --mesh they are all of dp.", "N")] = None,
    cpu_offload: Annotated[bool, Option("Keep parameters and moments on the host.")] = False,
    recompute: Annotated[bool, Option("Recompute activations in backward.")] = False,
    mixed_precision: Annotated[
        bool, Option("Keep weights, moments and sums of gradients in float32, and check it.")
    ] = False,
    loss_scaling: Annotated[
        bool, Option("Scale the loss, as float16 needs it; skip steps that overflow.")
    ] = False,
    packed: Annotated[bool, Option("Lay the rows of a rank's batch end to end in one.")] = False,
    compile: Annotated[bool, Option("Compile every decoder layer.")] = False,  # noqa: A002 - as the option is called
    lora: Annotated[bool, Option("Train a LoRA adapter only.")] = False,
    seed: Annotated[int, Option("Chooses texts, their lengths and random numbers.")] = 0,
    limits: options.Limits = "training",
    allow_unused: options.AllowUnused = None,
    disk: options.Disk = None,
    keep: options.Keep = "full",
    timeout: options.Timeout = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
) -> "CheckedVerdict":
    """Check that `model` trains on the candidate as on the reference.

    Arguments that `check_generate` also has mean the same.

    Returns: the verdict; `verdict.passed`, `str(verdict)`, `verdict.folder`.
    Raises: UsageError for what cannot be checked, MachineError for what this machine lacks.
    """
    arguments = dict(locals())
    from assay.api.inputs import globs
    from assay.launch import parse_mesh
    from assay.models.candidate_code import candidate_code
    from assay.models.remote_code import remote_code_of
    from assay.recording.capturing.budget import parse_size
    from assay.runs import RunFolder
    from assay.training.check import check_train as run_check
    from assay.training.overfit.check import check_overfit, overfit_options
    from assay.training.processes.requests import TrainCheck, TrainOptions

    of_overfit = {"--overfit-steps": overfit_steps, "--track": track}
    of_steps = {"--steps": steps, "--resume-at": resume_at, "--disk": disk}
    refuse_other_mode(of_steps, of_overfit, overfit=overfit)
    ranks = parse_mesh(mesh) if mesh else {}
    if world is not None and world != prod(ranks.values()):
        if mesh:
            raise UsageError(f"--world {world}: the mesh {mesh} has {prod(ranks.values())} ranks")
        ranks = parse_mesh(f"dp={world}")
    features = {
        "cpu-offload": cpu_offload,
        "recompute": recompute,
        "mixed-precision": mixed_precision,
        "loss-scaling": loss_scaling,
        "packed": packed,
        "compile": compile,
    }
    if micro_batches is None:
        # Two, or one for every stage of every rank of dp.
        micro_batches = max(2, ranks.get("dp", 1) * ranks.get("pp", 1))
    time_allowed = seconds_of_timeout(timeout)
    code = candidate_code(candidate_setup, arguments.pop("candidate_model"), candidate)
    folder = RunFolder.create("check train", output).path
    setup = arguments["candidate_setup"] = code.write(folder)
    check = TrainCheck(
        TrainOptions(
            model=str(model),
            micro_batches=micro_batches,
            lora=lora,
            seed=seed,
            remote_code=remote_code_of(trusted=trust_remote_code),
        ),
        reference,
        candidate,
        trainer=candidate_trainer,
        setup=setup,
        limits=limits,
        allow_unused=globs(allow_unused),
        max_disk=None if disk is None else parse_size(disk),
        keep=keep,
        mesh=ranks,
        features=tuple(name for name, wanted in features.items() if wanted),
        command=command_line(check_train, arguments),
    )
    if overfit:
        chosen = overfit_options(check.options, overfit_steps, learning_rate)
        run: Callable[..., object] = partial(check_overfit, tracker=track)
    else:
        chosen = _choose_steps(check.options, steps, resume_at, learning_rate)
        run = run_check
    return run_and_publish(partial(run, replace(check, options=chosen)), folder, time_allowed)


def refuse_other_mode(
    of_steps: Mapping[str, object], of_overfit: Mapping[str, object], *, overfit: bool
) -> None:
    """Raise UsageError for options of the mode that is not asked for: some steps, or --overfit."""
    others = of_steps if overfit else of_overfit
    given = " and ".join(name for name, value in others.items() if value is not None)
    if given and overfit:
        raise UsageError(
            f"{given} with --overfit: it trains for --overfit-steps, without a checkpoint or a recording"
        )
    if given:
        raise UsageError(f"{given} without --overfit: nothing would come of it")


def _choose_steps(
    options: "TrainOptions", steps: int | None, resume_at: int | None, learning_rate: float | None
) -> "TrainOptions":
    """Return `options` with the given values; a shorter run resumes earlier by default."""
    if steps is not None and resume_at is None:
        resume_at = max(1, min(options.resume_at, steps - 1))
    given = {"steps": steps, "resume_at": resume_at, "learning_rate": learning_rate}
    return options.model_copy(update={name: v for name, v in given.items() if v is not None})
