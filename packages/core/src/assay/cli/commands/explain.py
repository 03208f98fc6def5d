"""`assay explain`: the meaning, causes and remedy of a diagnosis."""

from typing import Annotated

from assay.api.options import Option
from assay.cli.derived_commands import with_options


@with_options
def explain(
    diagnosis: Annotated[
        str | None, Option("A diagnosis of verdict.json; without it, all are listed.")
    ] = None,
) -> None:
    """Say what a diagnosis means, what usually causes it, and what to do next."""
    from rich.text import Text

    from assay.comparing.wording.diagnoses import describe_diagnosis, list_diagnoses
    from assay.output.console import new_table, open_console

    console = open_console()
    if diagnosis is not None:
        console.print(Text(describe_diagnosis(diagnosis)))
        return
    table = new_table()
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, verdict, summary in list_diagnoses():
        table.add_row(name, verdict, summary)
    console.print(table)
