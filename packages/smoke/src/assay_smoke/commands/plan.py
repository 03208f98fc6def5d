"""`assay smoke plan`: which cases would be run, why, what is left out, and what it would take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.output.streams import print_text


def plan(  # noqa: PLR0913 - one for each option
    *,
    vendor: Annotated[
        str, typer.Option(metavar="NAME", help="Whose cards; an unknown name lists those known.")
    ] = "cpu",
    cards: Annotated[
        int, typer.Option(metavar="N", help="The largest number of cards that a case may use.")
    ] = 4,
    coverage: Annotated[
        Literal["one", "pairwise", "full"],
        typer.Option(
            metavar="one|pairwise|full",
            help="Each framework once; every pair of values that can meet; every case.",
        ),
    ] = "pairwise",
    budget: Annotated[
        str | None,
        typer.Option(metavar="30m", help="At most so long, the most valuable cases first."),
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Only ids that match, as pytest has it."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded runs; default: ~/.cache/assay, or XDG's."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Whose recorded runs count; default: of such a machine."),
    ] = None,
    refused: Annotated[
        bool, typer.Option("--refused", help="Also show what cannot be combined, and why.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show which cases `assay smoke run` would run, why, what is left out, and the time it takes.

    No device is needed, and nothing is run.

    Example: assay smoke plan --vendor amd --cards 4 --budget 30m

    Exit code: 0; 2 for options that mean nothing.
    """
    from assay_smoke.matrix.choosing.schedules import parse_budget
    from assay_smoke.matrix.planning import PlanOptions, plan_smoke

    planned = plan_smoke(
        PlanOptions(
            vendor=vendor,
            cards=cards,
            coverage=coverage,
            budget_seconds=None if budget is None else parse_budget(budget),
            expression=expression,
            history=history,
            machine=machine,
        )
    )
    if as_json:
        print_text(planned.model_dump_json(by_alias=True, indent=1))
        return
    from assay_smoke.commands.plan_tables import print_plan, print_refused

    print_plan(planned)
    if refused:
        print_refused(planned)
