"""`assay compare`: two dumps, compared offline."""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options
from assay.sites import ComparedLevel

_FORMATS = "docs/foreign-formats.md lists the formats."


def compare(  # noqa: PLR0913 - one for each option
    expected: Annotated[str, typer.Argument(metavar="EXPECTED", help=f"A dump. {_FORMATS}")],
    actual: Annotated[str, typer.Argument(metavar="ACTUAL", help="The dump that is judged.")],
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A trusted model, which recomputes ACTUAL from its dumped inputs."
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="DUMP",
            help="The same model in ACTUAL's precision, from a trusted machine. It sets the noise.",
        ),
    ] = None,
    level: Annotated[
        ComparedLevel | None, typer.Option(help="Compare no deeper than this; default: everything.")
    ] = None,
    name_map: Annotated[
        Path | None,
        typer.Option(
            "--map", metavar="FILE", help="TOML or JSON: module names, EXPECTED's to ACTUAL's."
        ),
    ] = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Compare norms only; dumps may hold statistics, no values."),
    ] = False,
    allow_unmatched: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Module or MODULE:PORT that may lack a partner."),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Compare this rank alone.")] = None,
    token_shift: Annotated[
        int | None,
        typer.Option(metavar="N", help="Pass of ACTUAL minus pass of EXPECTED; default: found."),
    ] = None,
    format_name: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Default: recognized.")
    ] = None,
    limits: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Shipped limits, or a TOML file.")
    ] = "noise",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:FUNC",
            help="A function (golden, my) -> (value, message), which becomes a column of the table.",
        ),
    ] = None,
    compat: Annotated[
        bool, typer.Option("--compat", help="Metrics by the formulas as published, uncorrected.")
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE.csv|.xlsx|.parquet",
            help="Folder of the run, by default runs/<time>-compare; or a table of all tensors.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
    ] = False,
) -> None:
    """Compare two dumps on disk: are they the same, and if not, where do they differ first?

    Each is a folder or file of any supported tool. No model runs unless --model is given.

    Example: assay compare dump/golden dump/mine

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """
    from assay.api.dumps import compare as run_comparison
    from assay.cli.verdict_output import end_with

    verdict = run_comparison(
        expected,
        actual,
        model=model,
        noise=noise,
        level=level,
        map=name_map,
        stats=stats,
        allow_unmatched=allow_unmatched or (),
        rank=rank,
        token_shift=token_shift,
        format=format_name,
        limits=limits,
        metric=metric or (),
        compat=compat,
        trust_remote_code=trust_remote_code,
        output=output,
    )
    end_with(verdict, as_json=as_json)
