"""All commands: those of assay, and those of other packages under the entry points `assay.commands`.

Importing this module imports no torch.
"""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from assay.api import checks
from assay.api.options import Option
from assay.cli.capture import CaptureCommand, capture
from assay.cli.ci import ci_app, init
from assay.cli.derived_commands import derive_command, with_options
from assay.cli.help_text import use_plain_help
from assay.cli.reproduce import reproduce
from assay.errors import MachineError, UsageError
from assay.output.streams import print_error, print_text

if TYPE_CHECKING:
    from assay.devices.detection import ListedDevice

GROUP = "assay.commands"

# A command that fails to import accepts any arguments, including --help.
_TAKES_ALL = {
    "allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True,
    "help_option_names": list[str](),
}  # fmt: skip

# Commands of packages that may be absent.
_PACKAGES = {"expect": "assay-expectations", "smoke": "assay-smoke", "bench": "assay-bench"}

_EXIT_CODES = """
    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
"""

# The commands in the order of help, the usual ones first. Others follow.
_ORDER = (
    "check", "capture", "compare", "reproduce", "report", "explain", "smoke", "expect", "bench", "ci",
)  # fmt: skip


class _OrderedGroup(TyperGroup):
    """Lists the usual commands first."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - a class of typer's own click
        """Return the names of all commands."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


app = typer.Typer(
    name="assay",
    cls=_OrderedGroup,
    help="Does this model train and generate on this accelerator as it does on the reference?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
check_app = typer.Typer(help="Check a model against a reference.", no_args_is_help=True)
models_app = typer.Typer(no_args_is_help=True, help="List the micro models, or train one again.")
app.add_typer(check_app, name="check")
app.add_typer(models_app, name="models")
app.add_typer(ci_app, name="ci")


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer's callback
    if asked:
        print_text(f"assay {version('assay-core')}")
        raise typer.Exit


@app.callback()
def _assay(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version of assay."
        ),
    ] = False,
) -> None:
    """Add --version."""


@check_app.callback()
def _check() -> None:
    """Check a model against a reference."""


check_app.command("generate")(
    derive_command(
        checks.check_generate,
        f"""Does MODEL generate on the candidate as on the reference?

    Example: assay check generate micro:llama --reference cpu/float32 --candidate sim/bfloat16
{_EXIT_CODES}""",
    )
)
check_app.command("train")(
    derive_command(
        checks.check_train,
        f"""Does MODEL train on the candidate as on the reference?

    Example: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16

    On ranks: assay check train micro:llama --reference cpu/float32 --candidate cpu/float32
    --candidate-trainer fsdp --mesh dp=2

    Overfit: assay check train micro:llama --reference cpu/float32 --candidate cpu/bfloat16
    --overfit --track tensorboard
{_EXIT_CODES}""",
    )
)
check_app.command("load")(
    derive_command(
        checks.check_load,
        f"""Does the loaded MODEL hold what its files say?

    Every tensor of the files must be in the loaded model, bit for bit. What no file holds must be
    equal after a second load. Keys of config.json that no code reads are named. The tokenizer
    must add one BOS and tokenize a chat once.

    Example: assay check load micro:llama --run cpu/bfloat16
{_EXIT_CODES}""",
    )
)

app.command("capture", cls=CaptureCommand)(capture)

app.command("compare")(
    derive_command(
        checks.compare,
        """Compare two dumps on disk: where do they first differ?

    Each is a folder or file of any supported tool, or a model folder, which may be quantized. No model runs
    unless --model is given.

    Example: assay compare dump/golden dump/mine

    Exit code: 0 PASS, 1 FAIL, 2 usage or environment error, 3 not everything could be compared.
    """,
    )
)


@app.command()
@with_options
def inspect(
    folder: Annotated[str, Option("A dump, trace or golden; a folder or URL.", "FOLDER")],
    *,
    as_format: Annotated[
        str | None, Option("Format of the dump. Default: recognized.", "NAME")
    ] = None,
    as_json: Annotated[bool, Option("Print JSON.")] = False,
) -> None:
    """List what a dump holds, and what is missing or damaged in it.

    Example: assay inspect dump/golden

    Exit code: 0, or 2 if the dump cannot be read.
    """
    from assay.plugins import import_torch_alone

    import_torch_alone()
    from assay.comparison.contents import describe_contents
    from assay.runs import open_progress

    with open_progress() as progress, progress.step(f"inspecting {folder}"):
        contents = describe_contents(folder, as_format)
    if as_json:
        print_text(json.dumps(contents.to_json(), indent=1))
    else:
        for line in contents.to_lines():
            print_text(line)


@app.command()
@with_options
def calibrate(
    clean: Annotated[
        list[str],
        Option(
            "RUNs that are known to be right, such as cpu/bfloat16; or measurements.jsonl of several"
            " `assay check generate`.",
            "RUN...|FILE.jsonl...",
        ),
    ],
    *,
    output: Annotated[Path, Option("File to write.", "LIMITS.toml")],
    reference: Annotated[
        str | None, Option("With RUNs: the trusted device. Default: cpu/float32.", "RUN")
    ] = None,
    model: Annotated[
        list[str] | None,
        Option("With RUNs: the model to run. Default: the micro decoders.", "MODEL"),
    ] = None,
) -> None:
    """Derive limits from runs that are known to be right.

    From RUNs it derives limits of the noise ratios, each from the largest ratio. From files it derives
    thresholds of the published token metrics, each from what every file needs to pass. The last line
    that it prints is then the variable of aiu-fms-testing-utils with both thresholds.

    Example: assay calibrate cpu/bfloat16 sim/bfloat16 sim:truncate/bfloat16 --output mine.toml

    Example: assay calibrate kept/*/measurements.jsonl --output thresholds.toml
    """
    if output.exists():
        raise UsageError(f"{output} exists already")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent} to write {output.name} into")
    files = [text for text in clean if text.endswith(".jsonl")]
    if files and len(files) < len(clean):
        raise UsageError("RUNs and files of measurements: give one kind of them")
    names = [*clean, *(model or [])]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{name} is given twice")
    for option, value in (("--model", model), ("--reference", reference)):
        if files and value:
            raise UsageError(
                f"{option} applies only to RUNs; files of measurements already have theirs"
            )
    if files:
        _calibrate_thresholds([Path(file) for file in files], output)
    else:
        _calibrate_ratios(clean, model or [], reference or "cpu/float32", output)


def _calibrate_ratios(
    runs: Sequence[str], models: Sequence[str], reference: str, output: Path
) -> None:
    from assay.devices.run_string import parse_run
    from assay.files import write_whole
    from assay.generate.check import MODELS, run_clean
    from assay.judge.limits import limits_file
    from assay.runs import RunFolder, open_progress

    trusted, *judged = (parse_run(text) for text in (reference, *runs))
    folder = RunFolder.create("calibrate")
    with open_progress() as progress:
        clean = run_clean(judged, models or MODELS, trusted, folder.path, progress)
    write_whole(output, limits_file(clean, _given_command()))
    print_text(output)


def _calibrate_thresholds(files: Sequence[Path], output: Path) -> None:
    from assay.files import write_whole
    from assay.judge.limits import (
        calibrate_thresholds,
        published_pair,
        read_clean_tokens,
        thresholds_file,
    )

    runs = [read_clean_tokens(file) for file in files]
    write_whole(output, thresholds_file(runs, _given_command()))
    print_text(output)
    print_text(published_pair(calibrate_thresholds(runs)))


def _given_command() -> str:
    return " ".join(["assay", *sys.argv[1:]])


@app.command()
@with_options
def devices(
    *,
    timeout: Annotated[
        float,
        Option("Time limit for the answers; some devices need longer.", "SECONDS", minimum=0.1),
    ] = 6.0,
    best: Annotated[
        str | None,
        Option("Print one RUN: the first accelerator in bfloat16, else the given one.", "RUN"),
    ] = None,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the devices of this machine, and what each vendor needs.

    A DEVICE of the list is the first part of a RUN, such as cuda:1/bfloat16. VERIFIED names the
    hardware on which its adapter was run. Other adapters were tried only with a stand-in for the vendor's software.

    Example: assay devices --json

    Example: assay devices --best cpu/float32
    """
    if best is not None:
        from assay.testing.self_test import best_run

        print_text(best_run(best, timeout))
        return
    from assay.devices.detection import list_devices

    lines = list_devices(timeout)
    if as_json:
        text = json.dumps({"schema": 1, "devices": [line.to_json() for line in lines]}, indent=1)
        print_text(text)
    else:
        _print_devices(lines)


def _print_devices(lines: "tuple[ListedDevice, ...]") -> None:
    from rich.text import Text

    from assay.output.console import new_table, open_console

    overview = new_table("DEVICE", "VENDOR", "STATUS", "VERIFIED", "DISTRIBUTED", "COMPILE")
    details = new_table("VENDOR", "RUNNER LABELS", "FOUND OR MISSING")
    styles = {"present": "green", "absent": "dim", "broken": "red"}
    for line in lines:
        vendor = line.vendor
        overview.add_row(
            line.device,
            vendor.title if vendor else "?",
            Text(line.status, style=styles[line.status]),
            (vendor.verified or "no") if vendor else "?",
            vendor.distributed_backend if vendor else "?",
            vendor.compile_backend if vendor else "?",
        )
        details.add_row(
            vendor.title if vendor else line.device,
            ", ".join(vendor.runner_labels) if vendor else "?",
            Text(_found_or_missing(line)),
        )
    open_console().print(overview, "", details, sep="\n")


def _found_or_missing(line: "ListedDevice") -> str:
    """Return the device names to use, or what to install."""
    if line.missing:
        return line.missing
    counted = {product: line.products.count(product) for product in line.products}
    found = ", ".join(
        f"{count} x {product}" if count > 1 else product for product, count in counted.items()
    )
    names = " ".join(f"{line.device}:{variant}" for variant in line.variants)
    return f"{found}: {names}" if names else found


@app.command()
@with_options
def selftest(
    *,
    candidate: Annotated[
        str | None,
        Option(
            "What is judged. Default: the first accelerator in bfloat16, else sim/bfloat16.", "RUN"
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option("Tokens to generate for each prompt.", minimum=1)] = 16,
    output: Annotated[Path | None, Option("Default: runs/<time>-selftest.", "DIR")] = None,
) -> None:
    """Check a small model here, and find a fault planted in it.

    Example: assay selftest --candidate cuda:1/float16

    Exit code: 0 the model passes and the fault is found, 1 otherwise, 2 usage or environment
    error, 3 not everything could be compared.
    """
    from assay.cli.ending import end_with, show_verdict
    from assay.devices.detection import DETECTION_TIMEOUT_SECONDS
    from assay.runs import RunFolder
    from assay.testing.self_test import PLANTED_MODULE, best_run, run_self_test

    run = candidate or best_run("sim/bfloat16", DETECTION_TIMEOUT_SECONDS)
    verdicts = run_self_test(run, max_new_tokens, RunFolder.create("selftest", output).path)
    if not (clean := next(verdicts)).passed:
        end_with(clean, as_json=False)
    show_verdict(clean)
    print_text("Now with a planted fault: this one has to FAIL.")
    show_verdict(planted := next(verdicts))
    found = "no place" if planted.location is None else planted.location.module
    if found != PLANTED_MODULE:
        print_error(f"assay: the planted fault is in {PLANTED_MODULE}, and was found at {found}")
        raise typer.Exit(1)
    print_text(
        f"✓ The selftest passes on {run}: the model agrees, and the planted fault was found."
    )


@app.command()
@with_options
def report(
    folders: Annotated[list[Path], Option("Folders of finished runs.", "DIR...")],
    *,
    output: Annotated[
        Path | None,
        Option(
            "Folder for the page. Default: DIR itself; for several, runs/<time>-report. "
            "A non-empty folder is refused."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, Option("Append a Markdown summary to this file, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    junit: Annotated[
        Path | None, Option("Write the verdicts and levels to this file as JUnit XML.", "FILE.xml")
    ] = None,
    as_json: Annotated[
        bool, Option("Print the verdict, or a list of them, and nothing else.")
    ] = False,
) -> None:
    """Draw the report of a finished run again, or of several runs.

    The exit code is that of the worst verdict.
    """
    from assay.files import write_whole
    from assay.output.console import open_console
    from assay.report.junit import make_suite, render_junit
    from assay.report.page.html import append_summary, publish_one, write_index
    from assay.report.run_report import read_report
    from assay.report.text_formats import print_index, print_report, render_markdown_of
    from assay.runs import RunFolder
    from assay.runs.results import format_verdict
    from assay.verdicts import overall_outcome

    reports = [read_report(folder) for folder in folders]
    console = open_console(sys.stderr if as_json else None)
    if len(reports) == 1:
        print_report(reports[0], console, publish_one(reports[0], output))
    else:
        page = write_index(reports, RunFolder.create("report", output).path)
        print_index(reports, console, page)
    if markdown is not None:
        append_summary(markdown, render_markdown_of(reports))
    if junit is not None:
        suites = [make_suite(each, each.folder.resolve().name) for each in reports]
        write_whole(junit, render_junit(suites))
    if as_json:
        texts = [format_verdict(each.verdict).rstrip() for each in reports]
        print_text(texts[0] if len(texts) == 1 else f"[{','.join(texts)}]")
    raise typer.Exit(overall_outcome([each.verdict.verdict for each in reports]).exit_code)


@app.command()
@with_options
def explain(
    diagnosis: Annotated[
        str | None,
        Option("A diagnosis, outcome, exit code or level. Default: list all but levels."),
    ] = None,
) -> None:
    """Say what a diagnosis or level means; of a diagnosis, also its usual causes and what to do."""
    from rich.text import Text

    from assay.judge.wording import describe_diagnosis, list_diagnoses
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


app.command("init")(init)
app.command("reproduce")(reproduce)


@models_app.command("list")
@with_options
def list_models(
    *,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
) -> None:
    """Show the recipes: what each is for, its size and its loss on held-out text."""
    from assay.models import RECIPES
    from assay.models.micro.recipes import read_provenance
    from assay.output.console import new_table, open_console

    records = {name: read_provenance(recipe) for name, recipe in RECIPES.items()}
    if as_json:
        print_text(json.dumps({"schema": 1, "models": records}, indent=1))
        return
    table = new_table("MODEL", "PARAMETERS", "HELD-OUT LOSS", "WHAT IT HAS")
    for name, recipe in RECIPES.items():
        table.add_row(f"micro:{name}", *_size_and_loss(records[name]), recipe.summary)
    open_console().print(table)


@models_app.command("build")
@with_options
def build(
    recipe: Annotated[str, Option("A recipe of `assay models list`.")],
    *,
    output: Annotated[
        Path | None, Option("Folder for the model; by default ./micro-RECIPE.")
    ] = None,
    seed: Annotated[int, Option("Seed of the initial weights and of the order of the text.")] = 0,
    threads: Annotated[
        int, Option("Number of threads; the trained weights depend on it.", minimum=1)
    ] = 2,
) -> None:
    """Train a micro model from the standard library's own text, and print its held-out loss.

    The result is a Hugging Face folder that every command takes as MODEL.
    """
    from assay.models.micro.recipes import find_recipe
    from assay.runs import open_progress

    steps = find_recipe(recipe).steps
    with (
        open_progress() as progress,
        progress.task(f"training micro:{recipe}", steps, "steps") as task,
    ):
        from assay.models.micro_training import build_model

        def show(step: int, num_steps: int, loss: float) -> None:
            task.advance()
            if step % 100 == 0 or step == num_steps:
                progress.note(f"step {step} of {num_steps}: training loss {loss:.3f}")

        report = build_model(
            recipe, output or Path(f"micro-{recipe}"), show, seed=seed, num_threads=threads
        )
    print_text(
        f"{report.folder}: {report.num_parameters:,} parameters, held-out loss"
        f" {report.held_out_loss:.3f} {report.loss_unit} ({report.held_out_loss_long:.3f} at 1,088"
        f" tokens), {report.seconds:.0f} s"
    )


def _size_and_loss(record: dict[str, Any] | None) -> tuple[str, str]:
    if record is None:
        return "?", "not installed"
    return f"{record['num_parameters']:,}", f"{record['held_out_loss']:.3f} {record['loss_unit']}"


@functools.cache
def build_command(app: typer.Typer) -> Callable[..., Any]:
    """Return the command line of `app` with the commands of other packages, built once in a process.

    A command that cannot be loaded raises when it is called.
    """
    for entry_point in entry_points(group=GROUP):
        try:
            extension = entry_point.load()
            if not isinstance(extension, typer.Typer):
                raise TypeError(f"{extension!r} is not a typer app")  # noqa: TRY301
            typer.main.get_command(extension)  # raises for parameters that typer cannot parse
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of others, imported
            _add_broken(app, entry_point, error)
        else:
            app.add_typer(extension, name=entry_point.name)
    known = {entry_point.name for entry_point in entry_points(group=GROUP)}
    for name in _PACKAGES.keys() - known:
        _add_absent(app, name)
    command = typer.main.get_command(app)
    use_plain_help(command)
    return command


def _add_absent(app: typer.Typer, name: str) -> None:
    @app.command(name, hidden=True, context_settings=_TAKES_ALL)
    def absent() -> None:
        package = _PACKAGES[name]
        raise MachineError(
            f"`assay {name}` is in {package}, which this Python does not have; install it:"
            f" {sys.executable} -m pip install {package}"
        )


def _add_broken(app: typer.Typer, entry_point: EntryPoint, error: BaseException) -> None:
    @app.command(
        entry_point.name,
        help=f"Cannot be loaded: {type(error).__name__}.",
        context_settings=_TAKES_ALL,
    )
    def broken() -> None:
        raise MachineError(
            f"the command {entry_point.name} cannot be loaded: {entry_point.value} raised"
            f" {type(error).__name__}: {error}; repair or uninstall its package"
        )
