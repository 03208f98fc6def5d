"""`assay check train`: do training steps do here what they do on the reference?"""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options


def train(  # noqa: PLR0913 - the options of the contract
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
            metavar="NAME|FILE.py:CLASS", help="How the candidate trains; default: reference."
        ),
    ] = None,
    candidate_setup: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNC", help="Called with the candidate's model before LoRA."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 3,
    resume_at: Annotated[
        int, typer.Option(help="Steps before the checkpoint from which training is resumed.")
    ] = 2,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of each step, of unequal token counts.")
    ] = 2,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter only.")] = False,
    seed: Annotated[int, typer.Option(help="Chooses texts, their lengths and random numbers.")] = 0,
    limits: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Limits of the noise ratios.")
    ] = "training",
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

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """
    from assay.cli.verdict_faces import finish
    from assay.runs import RunFolder, open_progress
    from assay.training.check import TrainCheck, check_train
    from assay.training.requests import TrainOptions

    check = TrainCheck(
        TrainOptions(
            model=model,
            steps=steps,
            resume_at=resume_at,
            micro_batches=micro_batches,
            lora=lora,
            seed=seed,
            remote_code="trust" if trust_remote_code else "refuse",
        ),
        reference,
        candidate,
        trainer=candidate_trainer,
        setup=candidate_setup,
        limits=limits,
    )
    folder = RunFolder.create("check train", output)
    with open_progress() as progress:
        check_train(check, folder.path, progress)
    finish(folder.path, as_json=as_json)
