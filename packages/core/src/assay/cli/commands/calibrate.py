"""`assay calibrate`: limits of the noise ratios from clean runs."""

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Runs known to be right: cpu/bfloat16.")
    ],
    *,
    output: Annotated[Path, typer.Option(metavar="LIMITS.toml", help="File to write.")],
    reference: Annotated[str, typer.Option(metavar="RUN", help="The trusted device.")] = (
        "cpu/float32"
    ),
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Default: the micro decoders.")
    ] = None,
) -> None:
    """Set each statistic's limit from the largest ratio of runs that are known to be right.

    Example: assay calibrate cpu/bfloat16 sim/bfloat16 sim:truncate/bfloat16 --output mine.toml
    """
    import sys

    from assay.comparing.calibration import limits_file
    from assay.devices.run_string import parse_run
    from assay.errors import UsageError
    from assay.generate.calibration_runs import MODELS, run_clean
    from assay.runs import RunFolder, open_progress, write_whole

    if output.exists():
        raise UsageError(f"{output} exists already")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to write {output.name} into")
    models = model or MODELS
    for text in (reference, *runs):
        parse_run(text)
    for text in (*runs, *models):
        if (*runs, *models).count(text) > 1:
            raise UsageError(f"{text} is given twice: a run counts once")
    folder = RunFolder.create("calibrate")
    with open_progress() as progress:
        clean = run_clean(runs, models, reference, folder.path, progress)
    write_whole(output, limits_file(clean, " ".join(["assay", *sys.argv[1:]])))
    typer.echo(output)
