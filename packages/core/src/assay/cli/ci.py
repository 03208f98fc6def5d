"""`assay init` and `assay ci`: check another repository in its CI."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.api.options import Option
from assay.ci.configuration import Step
from assay.cli.derived_commands import with_options
from assay.cli.ending import WrongUsage
from assay.errors import AssayError, MachineError, UsageError
from assay.output.streams import print_error, print_text

ci_app = typer.Typer(
    no_args_is_help=True, help="Run the checks that assay.toml lists for this repository."
)

_Root = Annotated[Path, Option("The repository, with its assay.toml.", "DIR")]
_Machine = Annotated[str, Option("A machine of assay.toml.", "MACHINE")]
_Tier = Annotated[
    str,
    Option(
        "Only this tier: check, smoke, expectations, bench. Default: all tiers of the machine.",
        "TIER",
    ),
]


@with_options
def init(
    *,
    machine: Annotated[
        list[str] | None,
        Option(
            "A machine: the labels of its runner on GitHub, and the device and dtype to judge; repeatable.",
            "NAME=LABEL[,LABEL]@RUN",
        ),
    ] = None,
    branch: Annotated[
        str, Option("The default branch. Default: the remote's, else the current one.", "NAME")
    ] = "",
    commit: Annotated[
        str, Option("The commit of assay to pin. Default: the tag of this version.", "SHA")
    ] = "",
    no_workflows: Annotated[
        bool,
        Option(
            "Write assay.toml alone, for Slurm and other CI systems; a --machine is then NAME=RUN."
        ),
    ] = False,
    yes: Annotated[bool, Option("Do not ask before writing.")] = False,
    root: Annotated[Path, Option("The repository.", "DIR")] = Path(),
) -> None:
    """Write assay.toml and two workflows that check a trainer.

    Nothing else is touched, and no existing file is replaced.

    Example: assay init --machine nvidia=my-h100@cuda/bfloat16

    Without GitHub: assay init --no-workflows --machine nvidia=cuda/bfloat16

    Exit code: 0; 2 if a file exists, or nothing was written.
    """
    from assay.ci.initializing import (
        NO_MODEL,
        default_branch,
        find_models,
        make_files,
        read_machine,
    )
    from assay.files import write_whole

    if not (root / ".git").exists():
        raise UsageError(f"{root.resolve()} is not the root of a git repository")
    machines = [read_machine(option) for option in machine or []]
    models = find_models(root)
    files = make_files(root, machines, branch, commit, models, workflows=not no_workflows)
    print_error(
        f"models: {', '.join(models)}"
        if models
        else f"models: no folder has a config.json and weights; {NO_MODEL} tests the machine alone"
    )
    for path, text in files.items():
        print_error(f"{path}: {len(text.splitlines())} lines")
    if not no_workflows:
        print_error(f"default branch: {branch or default_branch(root)} (--branch names another)")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nothing was written: without a terminal, add --yes")
        if not typer.confirm("Write these files?", err=True):
            raise UsageError("nothing was written")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    names = [one.name for one in machines if no_workflows or one.runs_on]
    first = next(iter(names), "cpu")
    print_text("Add runs/ to .gitignore, and commit the files.")
    if names and not no_workflows:
        labels = "; ".join(f"gh label create assay:{name}" for name in names)
        print_text(f"Create the labels on GitHub: {labels}")
    command = f"assay ci run {first}" if no_workflows else f"assay ci plan assay:{first}"
    print_text(f"Next: edit assay.toml, then run {command}")


@ci_app.command()
@with_options
def plan(
    context: typer.Context,
    label: Annotated[
        str,
        Option(
            "The label of a pull request. Default: the event of the workflow run; elsewhere, all labels.",
            "LABEL",
        ),
    ] = "",
    *,
    as_json: Annotated[bool, Option("Print one JSON object and nothing else.")] = False,
    root: _Root = Path(),
) -> None:
    """Show the jobs that a label or the event of a workflow run starts.

    The options of all commands, and the files of the repository that they name, are checked.

    Example: assay ci plan assay:nvidia

    All labels: assay ci plan

    Exit code: 0, also if there is nothing to do; 2 if the label or assay.toml is wrong.
    """
    from assay.ci import planning
    from assay.ci.configuration import (
        FILE,
        describe_models,
        read_configuration,
        require_installable,
    )
    from assay.ci.initializing import require_label_of_workflow
    from assay.report.page.html import append_summary

    if not label and os.environ.get("GITHUB_OUTPUT") and not (root / FILE).is_file():
        # The pull request that adds it: machines are read from its base.
        empty = planning.Plan("", nothing=f"the base of this pull request has no {FILE}")
        planning.publish_jobs(empty, os.environ)
        print_text(json.dumps(empty.to_json()) if as_json else f"nothing to do: {empty.nothing}")
        return
    read = read_configuration(root)
    is_overview = not label and not os.environ.get("GITHUB_EVENT_PATH")
    if is_overview:
        plans = planning.plan_all(read)
    else:
        plans = [planning.plan_label(read, label) if label else planning.plan_run(read, os.environ)]
    steps = [step for one in plans for step in one.steps(read)]
    for name in _require_valid(steps, root, context.find_root().command):
        print_error(f"assay: options of {name} are not checked: its package is not installed here")
    require_installable(read, root)
    require_label_of_workflow(read, root)
    for problem in describe_models(steps, root):
        print_error(f"assay: {problem}")
    if labels := dict.fromkeys(label for one in plans for job in one.jobs for label in job.runs_on):
        print_error(f"assay: not checked: whether a runner on GitHub has {', '.join(labels)}")
    chosen = plans[0]
    planning.publish_jobs(chosen, os.environ)
    explained = "\n".join(planning.describe_plan(read, one) for one in plans)
    document = chosen.to_json()
    if is_overview:
        document = {"schema": 1, "plans": [one.to_json() for one in plans]}
    print_text(json.dumps(document, indent=1) if as_json else explained)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        from assay.foreign_text import markdown_block

        append_summary(Path(summary), f"{markdown_block(explained)}\n")
    if chosen.refused and not is_overview:
        raise typer.Exit(2)


@ci_app.command()
@with_options
def install(
    machine: _Machine,
    *,
    tier: _Tier = "",
    root: _Root = Path(),
) -> None:
    """Install into this Python what the commands of a machine need, and the repository's own packages.

    The packages of assay get the version of this one. The arguments in `install` of assay.toml go to pip.

    Example: assay ci install nvidia

    Exit code: 0; 2 if pip fails.
    """
    from importlib.metadata import version

    from assay.ci.configuration import (
        list_distributions,
        list_steps,
        read_configuration,
        require_installable,
    )

    read = read_configuration(root)
    require_installable(read, root)
    of_assay = list_distributions(list_steps(read, machine, tier))
    pinned = [f"{name}=={version('assay-core')}" for name in of_assay]
    words = [sys.executable, "-m", "pip", "install", *pinned, *read.install]
    if code := subprocess.run(words, cwd=root, check=False).returncode:
        raise MachineError(f"pip failed with exit code {code}: {' '.join(words[1:])}")


@ci_app.command()
@with_options
def run(
    context: typer.Context,
    machine: _Machine,
    *,
    tier: _Tier = "",
    judged: Annotated[
        str,
        typer.Option(
            "--run", metavar="RUN", help="Judge this instead: cpu/bfloat16 rehearses a job."
        ),
    ] = "",
    output: Annotated[Path | None, Option("Default: runs/<time>-ci-run.", "DIR")] = None,
    root: _Root = Path(),
) -> None:
    """Run the job of a machine here, tier by tier, and summarize it.

    A tier starts if those before it pass. The folder gets a page of all runs, summary.md, and junit.xml
    for CI systems; on GitHub, the job gets the summary.

    Example: assay ci run nvidia --run cpu/bfloat16

    Exit code: that of the worst command: 2 usage or environment error, 1 FAIL, 3 not everything could
    be compared, 0 PASS.
    """
    from assay.ci.configuration import list_steps, list_uninstalled, read_configuration
    from assay.ci.running import run_steps, write_job
    from assay.devices.detection import require_run
    from assay.devices.run_string import RUN_DTYPES, Run, parse_run
    from assay.report.page.html import INDEX_FILE, append_summary
    from assay.runs import RunFolder

    read = read_configuration(root)
    if judged:
        read = read.with_run(machine, judged)
    steps = list_steps(read, machine, tier)
    if not steps:
        raise UsageError(f"assay.toml has no entries for {machine} to run")
    if absent := _require_valid(steps, root, context.find_root().command):
        raise UsageError(
            f"the packages of {', '.join(absent)} are not installed: assay ci install {machine}"
        )
    if lacking := list_uninstalled(read, root):
        print_error(
            f"assay: this Python lacks {', '.join(lacking)}, which the job installs (`install` in assay.toml)."
            f" Run: assay ci install {machine}"
        )
    _require_one_task(os.environ)
    run = parse_run(read.find(machine).run)
    words = {
        word for step in steps if "--candidate-python" not in step.words for word in step.words
    }
    judged_here = [
        one for one in (Run(run.device, dtype) for dtype in RUN_DTYPES) if str(one) in words
    ]
    if not judged_here and run.device in words:
        judged_here = [run]
    for one in judged_here:
        require_run(one)  # once, not in every command
    folder = RunFolder.create("ci run", output.resolve() if output else None).path.resolve()
    title = f"{machine}, rehearsed on {judged}" if judged else machine
    job = run_steps(title, steps, root, folder)
    summary = write_job(job, folder)
    print_text(summary)
    print_error(f"page: {folder / INDEX_FILE}")
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        append_summary(Path(path), summary)
    raise typer.Exit(job.exit_code)


def _require_one_task(variables: Mapping[str, str]) -> None:
    """Refuse to run in several tasks of Slurm: each would run the whole job."""
    advice = "it starts the ranks of its checks itself. Give it one task: srun --ntasks 1"
    in_step = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if in_step not in ("", "1"):
        raise UsageError(f"srun starts assay ci run in {in_step} tasks; {advice}")
    allocated = variables.get("SLURM_NTASKS", "1")
    if allocated not in ("", "1"):  # a batch script is one process, whatever its allocation
        print_error(f"assay: SLURM_NTASKS is {allocated}; {advice}")


def _require_valid(steps: Sequence[Step], root: Path, application: Any) -> list[str]:  # noqa: ANN401 - of click
    """Parse the options of all commands without running them, and look for the files that they name.

    application: the command `assay`.
    Returns: the steps whose commands are not installed.
    Raises: UsageError for a wrong option, a missing file, or a wrong key in the file of a command.
    """
    from assay.ci.configuration import find_missing

    if missing := find_missing(steps, root):
        raise UsageError(f"assay.toml names what does not exist: {', '.join(missing)}")
    absent = []
    for step in steps:
        command = application
        words = list(step.words_in(Path("DIR")))
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        if hasattr(command, "commands"):
            absent.append(step.name)
            continue
        try:
            with chdir(root):
                command.make_context(words[0] if words else "", words)
        except Exception as error:
            if not isinstance(error, WrongUsage | AssayError):
                raise
            message = error.format_message() if isinstance(error, WrongUsage) else str(error)
            raise UsageError(f"assay.toml: {step.entry}: {message}") from None
    return list(dict.fromkeys(absent))
