"""`assay runners`: plans and runs jobs, renders the files of machines, and checks workflows."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from assay.api.options import Option
from assay.cli.derived_commands import with_options
from assay.errors import UsageError
from assay.output.streams import print_error, print_text, print_warning_command

app = typer.Typer(
    no_args_is_help=True,
    help="Plan jobs of GitHub events, and set up machines for them.",
)

_Root = Annotated[Path, Option("A checkout of assay.", "DIR")]
_Nox = Annotated[str, Option("The Python that has nox.", "PYTHON")]


@app.command()
@with_options
def plan(
    event: Annotated[
        str,
        Option(
            "A label, or a recorded event. Default: the event of the workflow run.",
            "LABEL|EVENT.json",
        ),
    ] = "",
    *,
    unless_succeeded: Annotated[
        str, Option("Plan nothing if its last successful run was of this commit.", "WORKFLOW.yml")
    ] = "",
    explain: Annotated[bool, Option("Print the reasons instead of JSON.")] = False,
    root: _Root = Path(),
) -> None:
    """Plan the jobs that a label or an event of GitHub starts.

    In the workflow run of a pull request, a change of documentation alone starts nothing.

    Example: assay runners plan smoke:nvidia --explain

    Exit code: 0, also if there is nothing to do; 2 if a request is refused, or the event cannot be read.
    """
    from assay_runners.fleet import read_fleet
    from assay_runners.planning import explain_plan, make_plan
    from assay_runners.workflow_run import publish_plan, read_planned_event

    fleet = read_fleet(root)
    planned_event = read_planned_event(event, unless_succeeded, fleet, root, os.environ)
    chosen = make_plan(planned_event, fleet)
    publish_plan(chosen, os.environ)
    if explain:
        print_text(explain_plan(chosen))
    else:
        print_text(chosen.model_dump_json(indent=2))
        for refusal in chosen.refused:
            print_error(f"assay: {refusal.asked}: {refusal.why}")
    if chosen.refused:
        raise typer.Exit(2)


@app.command()
@with_options
def run(
    *,
    job: Annotated[str, Option("One of the `machines` of a plan.", "JSON", variable="ASSAY_JOB")],
    nox: _Nox = "python3",
    root: _Root = Path(),
) -> None:
    """Run a planned job on this machine, and write its summary.

    Exit code: 0; 1 a session failed or compared nothing; 2 usage; 75 the cards of this machine do not
    answer, and another machine may succeed.
    """
    from assay.files import parse_record
    from assay_runners.fleet import read_fleet
    from assay_runners.planning import MachineJob
    from assay_runners.running import Checkout, run_machine_job, summarize_job
    from assay_runners.workflow_run import add_to_summary, run_git

    asked = parse_record(MachineJob, job, "--job")
    result = run_machine_job(asked, read_fleet(root), Checkout(root, (nox, "-m", "nox")))
    summary = summarize_job(result, run_git(root, "rev-parse", "HEAD"))
    print_text(summary)
    add_to_summary(summary, os.environ)
    raise typer.Exit(result.exit_code)


@app.command()
@with_options
def rehearse(
    event: Annotated[str, Option("A label, or a recorded event.", "LABEL|EVENT.json")],
    *,
    patch: Annotated[Path | None, Option("The change of the event.", "FILE.diff")] = None,
    only: Annotated[
        list[str] | None, Option("Run only this planned session; repeatable.", "SESSION")
    ] = None,
    nox: _Nox = "python3",
    output: Annotated[Path | None, Option("Default: runs/<time>-runners-rehearse.", "DIR")] = None,
    root: _Root = Path(),
) -> None:
    """Run the jobs of a label or an event here, in a clean clone.

    The CPU replaces every accelerator, one Python runs everything, and the summary is printed. A page
    has the jobs, the sessions with their times and reports, and the summaries.

    Example: nox -s rehearse -- smoke:nvidia --only expectations

    Exit code: 0; 1 a session failed; 2 a request is refused, or the event cannot be read.
    """
    from assay.runs import RunFolder, open_progress
    from assay_runners.running import PAGE_FILE, rehearse
    from assay_runners.workflow_run import read_event

    read = read_event(event, {})
    folder = RunFolder.create("runners rehearse", output).path
    with open_progress() as progress:
        rehearsal = rehearse(
            read, patch, frozenset(only or ()), root.resolve(), folder.resolve(),
            (nox, "-m", "nox"), progress,
        )  # fmt: skip
    print_text(rehearsal.summary)
    print_error(f"The page: {folder / PAGE_FILE}")
    if rehearsal.exit_code:
        print_error(f"Repeat a failure in the clone; then remove {folder}")
    raise typer.Exit(rehearsal.exit_code)


@app.command()
@with_options
def propose(
    captured: Annotated[Path, Option("The captured files, in a folder for each machine.", "DIR")],
    *,
    reason: Annotated[str, Option("The reason for the recapture.", "TEXT", variable="REASON")],
    dry_run: Annotated[bool, Option("Only print the text of the pull request.")] = False,
    root: _Root = Path(),
) -> None:
    """Open the pull request of a recapture.

    Exit code: 0; 2 if nothing was captured, a file is not an expectation, or GitHub refuses.
    """
    from assay_runners.fleet import read_fleet
    from assay_runners.upkeep import gather, open_pull_request
    from assay_runners.workflow_run import add_to_summary

    proposal = gather(captured, root, reason)
    print_text(proposal.body)
    add_to_summary(proposal.body, os.environ)
    if not dry_run:
        base = read_fleet(root).github.protected_ref
        open_pull_request(proposal, root, base, os.environ)


@app.command(name="report-nightly")
@with_options
def report_nightly(
    *,
    results: Annotated[
        str,
        Option("The results of the preceding jobs, `toJSON(needs)`.", "JSON", variable="RESULTS"),
    ],
    root: _Root = Path(),
) -> None:
    """Update the two issues of the nightly run.

    Opens, comments on or closes "The nightly run fails" and "The machines need a newer runner".

    Exit code: 0; 2 if GitHub does not answer, or outside a workflow run.
    """
    from datetime import UTC, datetime

    from assay.errors import MachineError
    from assay_runners.fleet import read_fleet
    from assay_runners.upkeep import (
        NIGHT_FAILS,
        RUNNER_IS_OLD,
        find_outdated_runner,
        read_failures,
        update_issue,
    )

    print_text(update_issue(NIGHT_FAILS, read_failures(results), os.environ))
    pinned = read_fleet(root).github.runner_version
    try:
        outdated = find_outdated_runner(pinned, datetime.now(UTC))
    except MachineError as error:
        # The releases of another repository: the next night asks again.
        print_warning_command(f"the age of runner {pinned} is unknown: {error}")
        return
    print_text(update_issue(RUNNER_IS_OLD, [outdated] if outdated else [], os.environ))


@app.command()
@with_options
def reap(
    *,
    dry_run: Annotated[bool, Option("Only print what would be terminated.")] = False,
) -> None:
    """Terminate expired cloud instances.

    The tag `assay-expires` of an instance has the end of its lifetime.

    Exit code: 0, also if there are none; 2 if the cloud does not answer.
    """
    from datetime import UTC, datetime

    from assay_runners.upkeep import end_instances, find_expired

    expired = find_expired(datetime.now(UTC))
    for name, tag in expired.items():
        print_text(f"{name} expired {tag}")
    if expired and not dry_run:
        end_instances(expired)
    print_text(f"{len(expired)} {'would be terminated' if dry_run else 'terminated'}")


@app.command()
@with_options
def init(
    *,
    repository: Annotated[str | None, Option("Your repository on GitHub.", "OWNER/NAME")] = None,
    vendor: Annotated[
        list[str] | None, Option("A vendor of your machines; repeatable.", "NAME")
    ] = None,
    cards: Annotated[
        list[str] | None,
        Option("Numbers of cards of a vendor's machines. Default: unchanged.", "VENDOR=1,4"),
    ] = None,
    group: Annotated[str | None, Option("The runner group. Default: unchanged.", "NAME")] = None,
    plan: Annotated[
        str | None,
        Option(
            "public, or your plan if the repository is private: free, team or enterprise."
            " Default: unchanged.",
            "PLAN",
        ),
    ] = None,
    ghes: Annotated[
        str | None, Option("Your GitHub Enterprise Server. Default: unchanged.", "HOST")
    ] = None,
    root: _Root = Path(),
) -> None:
    """Set this checkout up for your repository and machines.

    Writes runners/, names your repository in .github/, and lists the settings to make on GitHub.

    Example: assay runners init --repository acme-llm/assay --plan team --vendor nvidia --cards nvidia=1,4

    Exit code: 0; 1 if `assay runners check` finds something; 2 for wrong options, and nothing is written.
    """
    from assay_runners.rendering import describe_settings
    from assay_runners.repository import initialize, read_cards

    asked = {
        "repository": repository or _ask("repository", "OWNER/NAME"),
        "plan": plan,
        "runner_group": group,
        "server": ghes,
    }
    settings = {name: value for name, value in asked.items() if value}
    vendors = vendor or _ask("vendor", "the vendors of your machines").split()
    fleet, removed = initialize(root, vendors, read_cards(cards or ()), settings)
    if removed:
        print_text(f"removed {', '.join(removed)}; they are in the last commit of runners/\n")
    print_text(describe_settings(fleet))
    check(root=root)


def _ask(option: str, what: str) -> str:
    """Ask a person. Raises: UsageError if nobody can answer."""
    if not sys.stdin.isatty():
        raise UsageError(f"--{option} is missing: {what}")
    answer: str = typer.prompt(what)
    return answer


@app.command()
@with_options
def check(*, root: _Root = Path()) -> None:
    """Check the workflows and the rendered files.

    Example: assay runners check

    Exit code: 0; 1 with a line for each problem; 2 a file cannot be read.
    """
    from assay_runners.checking.rules import Finding, check_workflows
    from assay_runners.fleet import read_fleet
    from assay_runners.rendering import find_outdated

    fleet = read_fleet(root)
    found = check_workflows(root, fleet)
    found += [
        Finding(str(path), 1, "rendered", f"{problem}; run `assay runners render`")
        for path, problem in find_outdated(root, fleet).items()
    ]
    right = "the workflows keep the rules; all rendered files are up to date"
    print_text("\n".join(map(str, found)) or right)
    raise typer.Exit(int(bool(found)))


@app.command()
@with_options
def verify(*, root: _Root = Path()) -> None:
    """Compare the settings on GitHub with those in runners/README.md.

    Reads them with `gh api`, as an owner of the organization, and changes nothing.

    Example: assay runners verify

    Exit code: 0, also if GitHub does not show a runner; 1 with a line for each wrong setting; 2 if gh is missing
    or may not read one.
    """
    from assay_runners.fleet import read_fleet
    from assay_runners.repository import compare_settings

    compared = compare_settings(read_fleet(root))
    lines = [*compared.wrong, *(f"not verified: {one}" for one in compared.unseen)]
    if not compared.wrong:
        lines.append(f"all {'other ' if compared.unseen else ''}settings are right")
    print_text("\n".join(lines))
    raise typer.Exit(int(bool(compared.wrong)))


@app.command()
@with_options
def render(*, root: _Root = Path()) -> None:
    """Write the files of each vendor's machines.

    They lie below runners/, and are rendered from the entries in runners/runners.toml.

    Example: assay runners render

    Exit code: 0; 2 if an entry is wrong.
    """
    from assay_runners.fleet import read_fleet
    from assay_runners.rendering import write_rendered

    changed = write_rendered(root, read_fleet(root))
    print_text("\n".join(map(str, changed)) or "everything is up to date")
