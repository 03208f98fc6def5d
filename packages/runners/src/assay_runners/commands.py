"""`assay runners`: what an event starts, what the machines are made of, whether all of it is safe."""

import os
from pathlib import Path
from typing import Annotated

import typer

from assay.output.streams import print_error, print_text, print_warning_command

app = typer.Typer(
    no_args_is_help=True,
    help="Which machines run what for an event of GitHub, and how a machine becomes a runner.",
)

_Root = Annotated[Path, typer.Option(metavar="DIR", help="A checkout of assay.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")]
_EventName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="For a payload alone: pull_request, push, merge_group, workflow_dispatch, schedule.",
    ),
]


@app.command()
def plan(
    payload: Annotated[
        Path | None,
        typer.Argument(
            metavar="EVENT.json",
            help="A recorded event, or a payload. Default: that of the workflow run.",
        ),
    ] = None,
    *,
    event: _EventName = None,
    changed_since: Annotated[
        str,
        typer.Option(
            metavar="COMMIT",
            help="Documentation alone starts nothing: compare with this. Default: where the commit"
            " left the protected branch, in a workflow run of a pull request; else all runs.",
        ),
    ] = "",
    unless_succeeded: Annotated[
        str,
        typer.Option(
            metavar="WORKFLOW.yml",
            help="Nothing where its last run that succeeded was of this commit.",
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why, instead of JSON for programs.")
    ] = False,
    root: _Root = Path(),
) -> None:
    """What does an event of GitHub start, on which machines, and why?

    Example: assay runners plan examples/events/label-smoke-nvidia.json --explain

    Exit code: 0, also where there is nothing to do, which the plan says; 2 if something was asked for
    that will not run, or the event cannot be read.
    """
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.planning.rules import make_plan
    from assay_runners.planning.wording import explain_plan
    from assay_runners.workflow_run.planning import publish_plan, read_planned_event

    fleet = read_fleet(root)
    planned_event = read_planned_event(
        payload, event, changed_since, unless_succeeded, fleet, root, os.environ
    )
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
def run(
    *,
    job: Annotated[
        str,
        typer.Option(
            metavar="JSON", envvar="ASSAY_JOB", help="One of the machines that a plan lists."
        ),
    ],
    nox: Annotated[
        str, typer.Option(metavar="PYTHON", help="The Python that has nox.")
    ] = "python3",
    root: _Root = Path(),
) -> None:
    """Run a planned job on this machine, and write the job's summary.

    Exit code: 0; 1 a session failed, or judged nothing; 2 usage; 75 the machine itself is at fault:
    its cards do not answer, and another machine may succeed.
    """
    from assay.files import parse_record
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.planning.plan import MachineJob
    from assay_runners.running.machine_job import Checkout, run_machine_job
    from assay_runners.running.summary import summarise_job
    from assay_runners.workflow_run.git import commit_of
    from assay_runners.workflow_run.outputs import add_to_summary

    asked = parse_record(MachineJob, job, "--job")
    result = run_machine_job(asked, read_fleet(root), Checkout(root, (nox, "-m", "nox")))
    summary = summarise_job(result, commit_of(root))
    print_text(summary)
    add_to_summary(summary, os.environ)
    raise typer.Exit(result.exit_code)


@app.command()
def rehearse(
    payload: Annotated[
        Path, typer.Argument(metavar="EVENT.json", help="A recorded event, or a payload.")
    ],
    *,
    event: _EventName = None,
    patch: Annotated[
        Path | None,
        typer.Option(metavar="FILE.diff", help="The change that the event is about."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SESSION", help="Of what is chosen, this alone; repeatable."),
    ] = None,
    nox: Annotated[
        str, typer.Option(metavar="PYTHON", help="The Python that has nox.")
    ] = "python3",
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/<time>-runners-rehearse.")
    ] = None,
    root: _Root = Path(),
) -> None:
    """What would this event start, and what would it say? Run here, in a clean clone.

    The CPU stands in for every accelerator, and one Python for all.

    Example: nox -s rehearse -- examples/events/label-smoke-nvidia.json --only expectations

    Exit code: 0; 1 a session failed; 2 something was refused, or the event cannot be read.
    """
    from assay.runs import RunFolder, open_progress
    from assay_runners.running.rehearsal import SUMMARY_FILE, RehearsalRequest, rehearse
    from assay_runners.workflow_run.events import read_event

    asked = RehearsalRequest(read_event(payload, event, {}), patch, frozenset(only or ()))
    folder = RunFolder.create("runners rehearse", output).path
    with open_progress() as progress:
        rehearsal = rehearse(asked, root.resolve(), folder.resolve(), (nox, "-m", "nox"), progress)
    print_text(rehearsal.summary)
    print_error(f"The summary: {folder / SUMMARY_FILE}")
    if rehearsal.exit_code:
        print_error(f"What failed can be repeated in its clone; then remove {folder}")
    raise typer.Exit(rehearsal.exit_code)


@app.command()
def propose(
    captured: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the machines captured, a folder for each.")
    ],
    *,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", envvar="REASON", help="Why it was captured anew.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the pull request's text, and change nothing.")
    ] = False,
    root: _Root = Path(),
) -> None:
    """Open the pull request of a recapture: every file, and what changed in it.

    Exit code: 0; 2 if nothing was captured, a file is no expectation, or GitHub refuses.
    """
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.workflow_run.outputs import add_to_summary
    from assay_runners.workflow_run.proposing import gather, open_pull_request

    proposal = gather(captured, root, reason)
    print_text(proposal.body)
    add_to_summary(proposal.body, os.environ)
    if not dry_run:
        base = read_fleet(root).github.protected_ref
        open_pull_request(proposal, root, base, os.environ)


@app.command(name="report-nightly")
def report_nightly(
    *,
    results: Annotated[
        str,
        typer.Option(metavar="JSON", envvar="RESULTS", help="The results of the jobs before this."),
    ],
    root: _Root = Path(),
) -> None:
    """Keep two issues: how the nightly run stands, and whether the machines need a newer runner.

    Each is opened, added to or closed.

    Exit code: 0; 2 if GitHub does not answer, or outside of a workflow run.
    """
    from datetime import UTC, datetime

    from assay.errors import MachineError
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.workflow_run.pinned_runner import find_outdated_runner
    from assay_runners.workflow_run.rolling_issue import (
        NIGHT_FAILS,
        RUNNER_IS_OLD,
        read_failures,
        update_issue,
    )

    print_text(update_issue(NIGHT_FAILS, read_failures(results), os.environ))
    pinned = read_fleet(root).github.runner_version
    try:
        outdated = find_outdated_runner(pinned, datetime.now(UTC))
    except MachineError as error:
        # Of another repository's releases: no reason to repeat the night, and asked again in the next.
        print_warning_command(f"how old runner {pinned} is was not answered: {error}")
        return
    print_text(update_issue(RUNNER_IS_OLD, [outdated] if outdated else [], os.environ))


@app.command()
def reap(
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would end, and end nothing.")
    ] = False,
) -> None:
    """End the cloud instances that outlived the lifetime in their tag `assay-expires`.

    Exit code: 0, also where there is none; 2 if the cloud does not answer.
    """
    from datetime import UTC, datetime

    from assay_runners.workflow_run.reaping import end_instances, find_expired

    expired = find_expired(datetime.now(UTC))
    for instance in expired:
        print_text(f"{instance.id} expired {instance.expired}")
    if expired and not dry_run:
        end_instances(expired)
    print_text(f"{len(expired)} {'would end' if dry_run else 'ended'}")


@app.command()
def check(*, root: _Root = Path(), as_json: _AsJson = False) -> None:
    """Do the workflows keep our rules, and are the rendered files those of the entries?

    Example: assay runners check

    Exit code: 0; 1 something is wrong, a line each; 2 a file cannot be read.
    """
    import json
    from dataclasses import asdict

    from assay_runners.checking import Finding, check_workflows
    from assay_runners.checking.workflow_files.sessions import read_sessions
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.rendering import find_outdated

    fleet = read_fleet(root)
    found = check_workflows(root, fleet, read_sessions(root))
    found += [
        Finding(str(path), 1, "rendered", f"{problem}; run `assay runners render`")
        for path, problem in find_outdated(root, fleet).items()
    ]
    if as_json:
        print_text(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print_text(
            "\n".join(map(str, found))
            or "the workflows keep the rules; all rendered files are up to date"
        )
    raise typer.Exit(int(bool(found)))


@app.command()
def render(*, root: _Root = Path()) -> None:
    """Write what each vendor's machines are made of, below runners/, from their entries.

    Example: assay runners render

    Exit code: 0; 2 if an entry is wrong.
    """
    from assay_runners.fleet.reading import read_fleet
    from assay_runners.rendering import write_rendered

    changed = write_rendered(root, read_fleet(root))
    print_text("\n".join(map(str, changed)) or "everything is up to date")
