"""`assay check train`: do training steps do here what they do on the reference?"""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options


def train(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ],
    *,
    reference: Annotated[str, typer.Option(metavar="RUN", help="The trusted device: cpu/float32.")],
    candidate: Annotated[
        str, typer.Option(metavar="RUN", help="What is judged, as DEVICE/DTYPE: sim/bfloat16.")
    ],
    candidate_trainer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:CLASS",
            help="reference, ddp, fsdp, tensor-parallel, pipeline; default: what fits the mesh.",
        ),
    ] = None,
    candidate_setup: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNC", help="Called with the candidate's model before LoRA."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: 3.")] = None,
    resume_at: Annotated[
        int | None,
        typer.Option(
            help="Steps before the checkpoint from which training is resumed; default: 2."
        ),
    ] = None,
    overfit: Annotated[
        bool,
        typer.Option("--overfit", help="Only: does it memorize a few sequences, as it should?"),
    ] = False,
    overfit_steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Steps of --overfit; default: 120, with --lora 160."),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Default: 0.001; with --overfit and --lora 0.01.")
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(metavar="tensorboard|wandb", help="Where the curves of --overfit go as well."),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches of each step, of unequal token counts; default: 2, or dp times pp."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="dp=2,tp=2", help="Ranks of the candidate by axis: dp, tp, pp."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks; without --mesh they are all of dp.")
    ] = None,
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", help="Keep parameters and moments on the host.")
    ] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute activations anew in backward.")
    ] = False,
    mixed_precision: Annotated[
        bool,
        typer.Option(
            "--mixed-precision",
            help="Keep weights, moments and sums of gradients in float32, and check it.",
        ),
    ] = False,
    loss_scaling: Annotated[
        bool,
        typer.Option(
            "--loss-scaling", help="Scale the loss, as float16 needs it; skip steps that overflow."
        ),
    ] = False,
    packed: Annotated[
        bool, typer.Option("--packed", help="Lay the rows of a rank's batch end to end in one.")
    ] = False,
    compile: Annotated[  # noqa: A002 - as the option is called
        bool, typer.Option("--compile", help="Compile every decoder layer.")
    ] = False,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter only.")] = False,
    seed: Annotated[int, typer.Option(help="Chooses texts, their lengths and random numbers.")] = 0,
    limits: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Limits of the noise ratios.")
    ] = "training",
    allow_unused: options.AllowUnused = None,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-check-train.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
    ] = False,
) -> None:
    """Does MODEL train on the candidate as on the reference?

    Example: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16

    On ranks: assay check train micro:llama --reference cpu/float32 --candidate cpu/float32
    --candidate-trainer fsdp --mesh dp=2

    By heart: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16
    --overfit --track tensorboard

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """
    from assay.api.training import check_train
    from assay.cli.verdict_output import end_with

    verdict = check_train(
        model,
        reference=reference,
        candidate=candidate,
        candidate_trainer=candidate_trainer,
        candidate_setup=candidate_setup,
        steps=steps,
        resume_at=resume_at,
        overfit=overfit,
        overfit_steps=overfit_steps,
        learning_rate=learning_rate,
        track=track,
        micro_batches=micro_batches,
        mesh=mesh,
        world=world,
        cpu_offload=cpu_offload,
        recompute=recompute,
        mixed_precision=mixed_precision,
        loss_scaling=loss_scaling,
        packed=packed,
        compile=compile,
        lora=lora,
        seed=seed,
        limits=limits,
        allow_unused=allow_unused,
        trust_remote_code=trust_remote_code,
        output=output,
    )
    end_with(verdict, as_json=as_json)
