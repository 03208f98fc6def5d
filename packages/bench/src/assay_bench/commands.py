"""`assay bench`: what is a model worth, and is that as much as before?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from assay.cli.generation_options import TrustRemoteCode
from assay.output.streams import print_text
from assay_bench.options import AsJson, Model, Output, Run
from assay_bench.performance.commands import ab, perf
from assay_bench.tuning.command import tune

if TYPE_CHECKING:
    from assay_bench.comparing.terms import Terms

app = typer.Typer(
    no_args_is_help=True, help="Evaluate a model with lm-eval, and hold the result to another one."
)
app.command()(tune)
app.command()(perf)
app.command()(ab)

_Suite = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE.toml",
        help="Its tasks, and the margins of a comparison: offline, retrained, core, leaderboard.",
    ),
]
_Margin = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="The drop of an accuracy that is too much: 0.02 is 2 points. Default: the suite's.",
    ),
]
_Movement = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="Both have to be the same model: how far log-probabilities may move, as a root mean"
        " square, a byte.",
    ),
]
_MarginNats = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="The same of right answers' log-probability, a byte. Default: the suite's.",
    ),
]


@app.command()
def run(  # noqa: PLR0913 - one for each option
    *,
    model: Model = "micro:llama",
    run: Run = "cpu/float32",
    suite: _Suite = "offline",
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.yaml", help="These tasks instead of a suite; repeatable."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The first N documents of each task.")
    ] = None,
    candidate_setup: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNC", help="Called with the model before it is asked."),
    ] = None,
    model_backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model of lm-eval instead: hf, vllm, local-completions, with --model-args.",
        ),
    ] = None,
    model_args: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the backend: pretrained=…; repeatable."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Of the backend: copies that share the documents (accelerate)."
        ),
    ] = 1,
    trust_remote_code: TrustRemoteCode = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """What is the model worth on a battery of tasks?

    Example: assay bench run --model micro:llama --run cpu/bfloat16

    Example: assay bench run --suite core --model-backend vllm --model-args pretrained=org/model

    A run that was interrupted goes on where it was, with the same --output.

    Exit code: 0 PASS, 1 FAIL (NaN, or a choice no better than a guess), 2 usage or environment error,
    3 so few items that a guess could not be told.
    """
    from assay.cli.verdict_output import finish
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress
    from assay.runs.results import write_results
    from assay_bench.battery.suites import TaskSuite, read_suite
    from assay_bench.evaluating.command_line import parse_backend
    from assay_bench.evaluating.running import EvaluationOptions, evaluate
    from assay_bench.evaluations.reading import read_evaluation
    from assay_bench.evaluations.scores import judge_scores

    options = EvaluationOptions(
        model=model,
        run=run,
        suite=TaskSuite(tasks=task) if task else read_suite(suite),
        limit=limit,
        setup=candidate_setup,
        remote_code=remote_code_of(trusted=trust_remote_code),
        backend=parse_backend(model_backend, model_args or [], processes),
    )
    run_folder = RunFolder.resume("bench run", output)
    folder = run_folder.path
    with open_progress() as progress:
        evaluate(options, folder, progress)
    write_results(judge_scores(read_evaluation(folder)), [], folder)
    finish(folder, as_json=as_json)


@app.command()
def compare(  # noqa: PLR0913 - one for each option
    base: Annotated[
        Path,
        typer.Argument(metavar="BASE", help="A run's folder, lm-eval's --output_path, a baseline."),
    ],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="The same, judged.")],
    *,
    suite: _Suite = "offline",
    margin: _Margin = None,
    margin_nats: _MarginNats = None,
    movement: _Movement = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=FIELD", help="The field of documents that belong together; repeatable."
        ),
    ] = None,
    output: Output = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for a job summary, and no more.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Is CANDIDATE as good as BASE, item by item? PASS, FAIL, or UNDERPOWERED: too few items to say.

    Example: assay bench compare before/ after/ --margin 0.01

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 UNDERPOWERED or not asked the same.
    """
    from assay.api.verdict import CheckedVerdict
    from assay.cli.verdict_output import end_with
    from assay.errors import UsageError
    from assay.runs import RunFolder
    from assay_bench.reporting.comparison_files import compare_folders

    if as_markdown and as_json:
        raise UsageError("--markdown and --json: give one of them")
    folder = RunFolder.create("bench compare", output).path
    terms = _terms(suite, {"margin": margin, "margin-nats": margin_nats, "movement": movement})
    text = compare_folders(base, candidate, terms, _pairs(cluster or []), folder)
    verdict = CheckedVerdict.publish(folder)
    if as_markdown:
        print_text(text, end="")
        raise typer.Exit(verdict.verdict.exit_code)
    end_with(verdict, as_json=as_json)


@app.command()
def accept(
    evaluation: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or lm-eval's --output_path.")
    ],
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE.json", help="The file to write.")],
    *,
    suite: _Suite = "offline",
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of the model, in reports. Default: its own.")
    ] = None,
    approved_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who takes it for right.")
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why; asked for where it is worse, or far better."),
    ] = None,
) -> None:
    """Make RUN what later ones are held to.

    Example: assay bench accept runs/bench baselines/llama.json --approved-by "A. Lovelace"

    Exit code: 0; 2 usage or environment error, also if a reason is missing.
    """
    from dataclasses import replace

    from assay_bench.baselines.accepting import accept as accept_evaluation
    from assay_bench.evaluations.reading import read_evaluation

    terms = _terms(suite, {})
    found = read_evaluation(evaluation)
    if name is not None:
        found = replace(found, name=name)
    print_text(accept_evaluation(found, baseline, terms, by=approved_by, reason=reason))


_TERMS = {"margin": "accuracy", "margin-nats": "log_probability", "movement": "movement"}


def _terms(suite: str, given: dict[str, float | None]) -> "Terms":
    """Those of the suite, but for what is given by option."""
    from assay.errors import UsageError
    from assay_bench.battery.suites import read_suite

    changed = {_TERMS[name]: value for name, value in given.items() if value is not None}
    for option, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{option} {value:g}: it is more than 0")
    return read_suite(suite).terms.model_copy(update=changed)


@app.command()
def page(
    *,
    compared: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Of `assay bench compare`; repeatable."),
    ] = None,
    tuned: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Of `assay bench tune`; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE.html")] = Path("bench.html"),
) -> None:
    """Write one page of comparisons with their bounds, and losses by step.

    Example: assay bench page --compared runs/compare --tuned runs/tuned --output bench.html
    """
    from assay.errors import UsageError
    from assay_bench.reporting.page import write_page

    if not (compared or tuned):
        raise UsageError("nothing to show: give --compared or --tuned")
    print_text(write_page(compared or (), tuned or (), output))


def _pairs(texts: list[str]) -> dict[str, str]:
    from assay.errors import UsageError

    pairs = dict(text.partition("=")[::2] for text in texts)
    if wrong := [text for text in texts if not text.partition("=")[2]]:
        raise UsageError(f"--cluster {wrong[0]}: write it as TASK=FIELD")
    return pairs
