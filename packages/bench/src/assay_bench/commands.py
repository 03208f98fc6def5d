"""The command `assay bench`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.api.options import Model, Option, TrustRemoteCode
from assay.cli.derived_commands import with_options
from assay.output.streams import print_error, print_text

if TYPE_CHECKING:
    from assay_bench.comparing import Terms
    from assay_bench.results import Evaluation

app = typer.Typer(
    no_args_is_help=True,
    help="Evaluate models with lm-eval, compare the results, and measure speed.",
)

_Run = Annotated[str, Option("Device and dtype: cpu/bfloat16.", "RUN")]
_Output = Annotated[
    Path | None, Option("Default: runs/<time>-bench-<command>.", "DIR", group="Output")
]
_AsJson = Annotated[bool, Option("Print the result as JSON and nothing else.")]
_Suites = Annotated[list[str] | None, Option("Repeatable. Default: all.", "NAME")]

_Suite = Annotated[
    str,
    Option(
        "Tasks, and margins for a comparison: offline, retrained, core, leaderboard.",
        "NAME|FILE.toml",
        group="Tasks",
    ),
]
_JudgingSuite = Annotated[
    str | None,
    Option(
        "Suite whose margins, metrics and clusters judge. Default: that of the base, else offline.",
        "NAME|FILE.toml",
        group="Tasks",
    ),
]
_Margin = Annotated[
    float | None,
    Option(
        "Largest acceptable drop in accuracy: 0.02 is 2 points. Default: from the suite.",
        "SHARE",
        group="Judgment",
    ),
]
_MarginNats = Annotated[
    float | None,
    Option(
        "Largest acceptable drop in the log-probability of right answers, per byte."
        " Default: from the suite.",
        "NATS",
    ),
]
_Metrics = Annotated[
    list[str] | None,
    Option("Judge only this metric of a task or group; repeatable. Default: all.", "TASK=METRIC"),
]


@app.command()
@with_options
def perf(
    *,
    run: _Run = "cpu/float32",
    model: Model = "micro:llama",
    suite: _Suites = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Measure the speed of training, generation and assay itself on this machine.

    Times are compared with this machine's own matrix product and read bandwidth, measured between rounds.

    Example: assay bench perf --suite training-step --suite decode

    Exit code: 0 measured, 2 usage or environment error, or a failed suite.
    """
    from assay.devices.detection import require_run
    from assay.devices.run_string import parse_run
    from assay.output.console import open_console
    from assay.runs import RunFolder, open_progress
    from assay_bench.performance.records import make_request
    from assay_bench.performance.running import performance_table, run_suites

    request = make_request(suite or [], run, model)
    require_run(parse_run(run))
    folder = RunFolder.create("bench perf", output)
    with open_progress() as progress:
        result = run_suites(request, folder.path.resolve(), progress)
    open_console(sys.stderr if as_json else None).print(performance_table(result))
    if as_json:
        print_text(result.to_json())
    else:
        print_text(f"{result.machine}; samples: {folder.path}")


@app.command()
@with_options
def ab(
    environments: Annotated[
        tuple[Path, Path],
        Option(
            "Virtual environments or Python executables, or folders of `perf` (or of several such folders);"
            " B is judged.",
            "A B",
        ),
    ],
    *,
    run: _Run = "cpu/float32",
    model: Model = "micro:llama",
    suite: _Suites = None,
    margin: Annotated[
        float,
        Option(
            "Largest acceptable slow-down, as a share: 0.05 is 5 %.",
            "SHARE",
            minimum=0.0,
            group="Judgment",
        ),
    ] = 0.05,
    blocks: Annotated[
        int, Option("Runs of A and of B, at least 6. More narrow the interval.", "N")
    ] = 10,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Compare the speed of two Python environments, which take turns on this machine, or of stored results of `perf`.

    Example: assay bench ab /opt/torch-2.12 /opt/torch-2.13 --suite training-step

    Example: assay bench ab runs/perf-before runs/perf-after

    An interrupted comparison of environments continues with the same --output.

    Exit code: 0 PASS, 1 FAIL (B is slower by more than the margin), 2 usage or environment error, 3 NOT_COMPARED
    (underpowered: the interval is too wide; or a suite ran on only one side).
    """
    from assay.cli.ending import finish
    from assay.output.console import open_console
    from assay.runs import RunFolder, open_progress
    from assay.runs.results import write_results
    from assay_bench.performance import running
    from assay_bench.performance.records import choose_suites, make_request

    chosen = choose_suites(suite or [])
    took_turns = not any(map(running.find_stored, environments))
    open_folder = RunFolder.resume if took_turns else RunFolder.create
    folder, sides = open_folder("bench ab", output).path, environments
    if took_turns:
        running.require_blocks(blocks)
        request = make_request(chosen, run, model)
        with open_progress() as progress:
            sides = running.measure_environments(
                environments,
                request,
                num_blocks=blocks,
                folder=folder.resolve(),
                progress=progress,
            )
    runs = running.read_sides(*sides)
    verdict, rows = running.compare_sides(
        runs, environments, suites=chosen, margin=margin, took_turns=took_turns
    )
    open_console(sys.stderr if as_json else None).print(running.comparison_table(verdict))
    write_results(verdict, rows, folder)
    finish(folder, as_json=as_json)


@app.command()
@with_options
def run(  # noqa: PLR0913 - one for each option
    *,
    model: Model = "micro:llama",
    run: _Run = "cpu/float32",
    candidate_setup: Annotated[
        str | None, Option("Call FUNC with the loaded model.", "FILE.py:FUNC")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    suite: _Suite = "offline",
    task: Annotated[
        list[str] | None, Option("Run this task, not a suite; repeatable.", "NAME|FILE.yaml")
    ] = None,
    limit: Annotated[
        int | None, Option("Ask only the first N documents of each task.", "N", minimum=1)
    ] = None,
    num_fewshot: Annotated[
        int | None,
        Option("Examples before each question. Default: from suite and task.", "N", minimum=0),
    ] = None,
    apply_chat_template: Annotated[
        bool, Option("Ask in the chat template of the model's tokenizer.")
    ] = False,
    system_instruction: Annotated[
        str | None, Option("Text before each question, sent as the system message.", "TEXT")
    ] = None,
    gen_kwargs: Annotated[
        list[str] | None,
        Option("Argument of generation, such as temperature=0; repeatable.", "KEY=VALUE"),
    ] = None,
    batch_size: Annotated[
        str | None,
        Option(
            "Texts in a call of the model, or auto. Default: 32; other model classes than hf: lm-eval's.",
            "N",
        ),
    ] = None,
    model_backend: Annotated[
        str | None,
        Option(
            "Use a model class of lm-eval with --model-args: hf, vllm, local-completions.",
            "NAME",
            group="Model classes of lm-eval",
        ),
    ] = None,
    model_args: Annotated[
        list[str] | None, Option("Backend argument: pretrained=…; repeatable.", "KEY=VALUE")
    ] = None,
    processes: Annotated[
        int, Option("Backend copies that share the documents (accelerate).", "N", minimum=1)
    ] = 1,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Evaluate a model on a suite of tasks.

    Example: assay bench run --model micro:llama --run cpu/bfloat16

    Example: assay bench run --suite core --model-backend vllm --model-args pretrained=org/model

    An interrupted run continues with the same --output.

    Exit code: 0 PASS (better than a guess), 1 FAIL (NaN, or shown to be no better), 2 usage or environment error,
    3 NOT_COMPARED (underpowered: too few items to tell the model from a guess; or no task is judged).
    """
    from assay.cli.ending import finish
    from assay.devices.run_string import parse_run
    from assay.errors import UsageError
    from assay.models.sources import remote_code_of
    from assay.runs import RunFolder, open_progress
    from assay.runs.results import write_results
    from assay_bench import run_tasks
    from assay_bench.comparing import chosen_metrics
    from assay_bench.lm_eval_files import read_evaluation
    from assay_bench.results import judge_scores, measurements_of
    from assay_bench.tuning.records import require_decoder

    chosen = run_tasks.TaskSuite(tasks=task) if task else run_tasks.read_suite(suite)
    for name in sorted({*chosen.tasks}.difference(run_tasks.TASKS)):
        run_tasks.load_task(name, Path())  # refuses a task file
    if num_fewshot is not None:
        chosen = chosen.model_copy(update={"fewshot": num_fewshot})
    settings = run_tasks.Settings(
        limit=limit,
        batch_size=run_tasks.parse_batch_size(batch_size),
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        gen_kwargs=run_tasks.parse_mapping("gen-kwargs", "KEY=VALUE", gen_kwargs or []),
    )
    remote_code = remote_code_of(trusted=trust_remote_code)
    backend = run_tasks.parse_backend(model_backend, model_args or [], processes, remote_code)
    if backend is not None and candidate_setup is not None:
        raise UsageError("--candidate-setup needs assay's own loader: omit --model-backend")
    if backend is None:
        parse_run(run)
        require_decoder(model)
    folder = RunFolder.resume("bench run", output).path
    with open_progress() as progress:
        if backend is not None:
            run_tasks.run_command_line(backend, chosen, settings, folder, progress)
        else:
            request = run_tasks.EvaluationRequest(
                model=model,
                run=run,
                suite=chosen,
                setup=candidate_setup,
                remote_code=remote_code,
                folder=folder.resolve(),
                **settings.model_dump(),
            )
            run_tasks.evaluate(request, progress)
    found = read_evaluation(folder)
    scores = judge_scores(found, chosen_metrics(found, chosen.terms.metrics))
    write_results(scores, measurements_of(found), folder)
    finish(folder, as_json=as_json)


@app.command()
@with_options
def tune(
    recipe: Annotated[str, Option("A recipe file, or the shipped recipe: micro.", "RECIPE.toml")],
    *,
    run: Annotated[str | None, Option("Device and dtype. Default: from the recipe.", "RUN")] = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Train models on a known text, and check what they learned.

    Writes a Hugging Face folder, losses and a record for each model, permutation and seed.
    An interrupted run continues with the same --output.

    Example: assay bench tune micro --output runs/tuned

    Example: assay bench tune micro --run cuda/float32

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 NOT_COMPARED (underpowered: too few held-out rows to
    decide).
    """
    from assay.cli.ending import finish
    from assay.runs import open_progress
    from assay_bench.tuning.records import read_recipe
    from assay_bench.tuning.running import open_folder, run_tunings

    read, sources = read_recipe(recipe, run)
    folder = open_folder(read, output)
    with open_progress() as progress:
        run_tunings(read, sources, folder, progress)
    finish(folder, as_json=as_json)


@app.command()
@with_options
def selftest(
    *,
    run: Annotated[
        str | None, Option("Default: the first accelerator in float32, else cpu/float32.", "RUN")
    ] = None,
    output: _Output = None,
) -> None:
    """Tune a micro model in two ways, and compare its answers with the shipped baselines.

    Example: assay bench selftest --run cuda/float32

    Exit code: 0 PASS; 1 FAIL; 2 usage or environment error; 3 NOT_COMPARED (underpowered, or the
    questions differ from the baselines'). The questions are made from the standard library; the baselines used Python 3.11's.
    """
    from assay.devices.detection import DETECTION_TIMEOUT_SECONDS
    from assay.runs import RunFolder, open_progress
    from assay.testing.self_test import best_run
    from assay_bench.self_test import run_self_test

    if run is None:
        run = f"{best_run('cpu/float32', DETECTION_TIMEOUT_SECONDS).partition('/')[0]}/float32"
    folder = RunFolder.create("bench selftest", output).path
    with open_progress() as progress:
        outcome = run_self_test(run, folder, progress)
    print_text(f"{outcome}: {folder}")
    raise typer.Exit(outcome.exit_code)


@app.command()
@with_options
def compare(  # noqa: PLR0913 - one for each option
    base: Annotated[
        Path, Option("Folder of a run, --output_path of lm-eval, or baseline.", "BASE")
    ],
    candidate: Annotated[Path, Option("Same kinds; is judged.", "CANDIDATE")],
    *,
    suite: _JudgingSuite = None,
    task: Annotated[
        list[str] | None, Option("Judge only this task or group; repeatable. Default: all.", "NAME")
    ] = None,
    metric: _Metrics = None,
    cluster: Annotated[
        list[str] | None, Option("Document field that names the cluster; repeatable.", "TASK=FIELD")
    ] = None,
    margin: _Margin = None,
    margin_nats: _MarginNats = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Compare two evaluations item by item: PASS, FAIL, or NOT_COMPARED.

    Example: assay bench compare before/ after/ --margin 0.01

    Example: assay bench compare before/ after/ --metric hellaswag=acc_norm

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 NOT_COMPARED (underpowered:
    too few items to decide; different questions; or a task that only BASE has).
    """
    from assay.api.verdict import CheckedVerdict
    from assay.cli.ending import end_with
    from assay.files import validate_record
    from assay.runs import RunFolder
    from assay_bench.comparing import Terms
    from assay_bench.comparison_files import read_sides, write_comparison
    from assay_bench.run_tasks import parse_mapping, parse_pairs, read_suite

    limits = {"accuracy": ("--margin", margin), "log_probability": ("--margin-nats", margin_nats)}
    given = {limit: one for limit, one in limits.items() if one[1] is not None}
    for limit, (option, value) in given.items():
        validate_record(Terms, {limit: value}, option)
    metrics: dict[str, tuple[str, ...]] = {}
    for place, name in parse_pairs("metric", "TASK=METRIC", metric or []):
        metrics[place] = (*metrics.get(place, ()), name)
    clusters = parse_mapping("cluster", "TASK=FIELD", cluster or [])
    was, now = read_sides(base, candidate, clusters, read_suite(suite).clusters if suite else None)
    terms, note = _choose_terms(was, now, suite)
    options = [option for option, _ in given.values()]
    changed: dict[str, Any] = {limit: value for limit, (_, value) in given.items()}
    changed |= {"metrics": terms.metrics | metrics, "tasks": tuple(task or ())}
    changed["sources"] = terms.sources | {limit: option for limit, (option, _) in given.items()}
    folder = RunFolder.create("bench compare", output).path
    write_comparison(
        was, now, terms.model_copy(update=changed), folder, ["; ".join([note, *options])]
    )
    end_with(CheckedVerdict.publish(folder), as_json=as_json)


@app.command()
@with_options
def accept(
    evaluation: Annotated[Path, Option("Folder of a run, or --output_path of lm-eval.", "RUN")],
    baseline: Annotated[Path, Option("File to write.", "BASELINE.json")],
    *,
    suite: _JudgingSuite = None,
    approved_by: Annotated[
        str | None,
        Option("Who approves the baseline. Default: not approved.", "NAME", group="Record"),
    ] = None,
    reason: Annotated[
        str | None,
        Option("Required if the run is worse or far better than the old baseline.", "TEXT"),
    ] = None,
) -> None:
    """Accept RUN as the baseline of later runs.

    Example: assay bench accept runs/bench baselines/llama.json --approved-by "A. Lovelace"

    Exit code: 0; 2 usage or environment error, or a missing reason.
    """
    from assay.judge.wording import format_count
    from assay_bench.comparison_files import accept as accept_evaluation
    from assay_bench.lm_eval_files import read_evaluation
    from assay_bench.run_tasks import read_suite

    found = read_evaluation(evaluation, read_suite(suite).clusters if suite else None)
    terms, _ = _choose_terms(found, found, suite)
    outcome = "replaced" if baseline.is_file() else "accepted"
    path = accept_evaluation(found, baseline, terms, by=approved_by, reason=reason)
    approval = "" if approved_by else ", not approved; to approve: --approved-by NAME"
    print_error(f"{outcome}: {format_count(len(found.tasks), 'task')}{approval}")
    print_text(path)


def _choose_terms(
    base: "Evaluation", candidate: "Evaluation", suite: str | None
) -> tuple["Terms", str]:
    """Return the terms of the named suite or of the runs, and a note that names it."""
    from assay_bench.comparing import choose_terms
    from assay_bench.run_tasks import read_suite

    given = read_suite(suite).recorded if suite else None
    return choose_terms(base, candidate, given, read_suite("offline").recorded)
