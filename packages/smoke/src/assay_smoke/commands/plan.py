"""`assay smoke plan`: the cases of a session, their reasons and their expected time."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.output.streams import print_text


@with_options
def plan(  # noqa: PLR0913 - one for each option
    *,
    vendor: Annotated[str, Option("Vendor of the cards; a wrong name lists them.", "NAME")] = "cpu",
    cards: Annotated[int, Option("Largest number of cards per case.", "N")] = 4,
    coverage: Annotated[
        Literal["one", "pairwise", "full"],
        Option(
            "Each framework once; every possible pair of values; every case.", "one|pairwise|full"
        ),
    ] = "pairwise",
    budget: Annotated[
        str | None, Option("Take the most valuable cases in this time.", "30m")
    ] = None,
    expression: Annotated[
        str | None,
        typer.Option("-k", metavar="EXPR", help="Take only matching ids, as in `pytest -k`."),
    ] = None,
    history: Annotated[
        Path | None, Option("Recorded runs. Default: in the user's cache.", "FILE")
    ] = None,
    machine: Annotated[
        str | None, Option("Machine whose recorded runs count. Default: this kind.", "KIND")
    ] = None,
    refused: Annotated[bool, Option("Also show refused combinations and reasons.")] = False,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the cases that `assay smoke run` would run, why, how long, and what it leaves out.

    Runs nothing and needs no device.

    Example: assay smoke plan --vendor amd --cards 4 --budget 30m

    Exit code: 0; 2 for wrong options.
    """
    from assay_smoke.commands.plan_output import print_plan, print_refused
    from assay_smoke.matrix.ordering import parse_budget
    from assay_smoke.matrix.planning import PlanOptions, plan_smoke
    from assay_smoke.matrix.rules import require_vendor

    planned = plan_smoke(
        PlanOptions(
            vendor=require_vendor(vendor),
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
    print_plan(planned)
    if refused:
        print_refused(planned)
