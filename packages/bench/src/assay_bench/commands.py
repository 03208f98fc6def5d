"""`assay bench`: what is a model worth on a task, and did that go down?"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, help="Evaluate a model with lm-eval, offline, and compare results."
)

_Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-bench-<command>.")
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print the verdict as JSON and nothing else.")
]


@app.command()
def run(
    *,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ] = "micro:llama",
    run: Annotated[
        str, typer.Option(metavar="RUN", help="Where it runs, as DEVICE/DTYPE: cpu/bfloat16.")
    ] = "cpu/float32",
    task: Annotated[
        str, typer.Option(metavar="NAME|FILE.yaml", help="A task of lm-eval over local JSON.")
    ] = "next-text",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Is the model better than a guess, and by how much?

    Example: assay bench run --model micro:llama --run cpu/bfloat16

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 the task has no documents.
    """
    from assay.cli.verdict_output import finish
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress
    from assay_bench.results import EvaluationRequest
    from assay_bench.running import run_bench

    folder = RunFolder.create("bench run", output)
    asked = EvaluationRequest(
        model=model,
        run=run,
        task=task,
        folder=str(folder.path.resolve()),
        remote_code=remote_code_of(trusted=trust_remote_code),
    )
    with open_progress() as progress:
        run_bench(asked, progress)
    finish(folder.path, as_json=as_json)


@app.command()
def compare(
    expected: Annotated[Path, typer.Argument(metavar="A", help="Folder of an earlier run.")],
    actual: Annotated[Path, typer.Argument(metavar="B", help="Folder of a later one.")],
    *,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Is B lower than A by more than chance? A paired test over the documents decides.

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 the two were not asked the same.
    """
    from assay.cli.verdict_output import finish
    from assay.runs import RunFolder
    from assay_bench.running import compare_results

    folder = RunFolder.create("bench compare", output)
    compare_results(expected, actual, folder.path)
    finish(folder.path, as_json=as_json)
