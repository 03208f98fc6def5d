"""The commands and the actions of steps."""

import re
from collections.abc import Iterator

from assay_runners.checking.context import Context, Finding, make_finding
from assay_runners.checking.workflow_files.call_graph import called_file
from assay_runners.fleet.reading import RUNNERS_FILE
from assay_runners.planning.choices import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY
from assay_runners.planning.labels import TIER_SESSIONS

_NOX = re.compile(r"(python3 -m )?nox -s (?P<names>[\w -]+?)( -- .+)?")
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_OWN = "$/.github/"
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def pinned_actions(context: Context) -> Iterator[Finding]:
    """Require the commit and the version of each foreign action, and `$/` for our own."""
    rule = "pin"
    for document in context.documents:
        used = [(step.uses, step.line_of("uses")) for step in document.steps if step.uses]
        used += [(job.uses, job.line_of("uses")) for job in document.jobs.values() if job.uses]
        for uses, line in used:
            if uses.startswith(_OWN) or called_file(uses) == "accelerator.yml":
                continue  # the rule `machine-guard` checks the branch of accelerator.yml
            if uses.startswith("./"):
                message = (
                    f"{uses} is a file of the checkout; write $/ for that of the running workflow"
                )
                yield make_finding(rule, document, line, message)
            elif not _PINNED.fullmatch(uses):
                message = f"{uses} can become other code; write its commit, 40 digits"
                yield make_finding(rule, document, line, message)
            elif not _VERSION.search(document.lines[line - 1]):
                message = f"{uses} has no version; write it after the commit: # v1.2.3"
                yield make_finding(rule, document, line, message)


def no_expressions_in_commands(context: Context) -> Iterator[Finding]:
    """Require that expressions reach commands through `env`: their values may contain shell code."""
    for document in context.documents:
        for step in document.steps:
            places = {"run": step.run, "shell": str(step.raw.get("shell") or "")}
            places["script"] = str(step.inputs.get("script") or "")
            for key, text in places.items():
                if "${{" in text:
                    message = f"`{key}` contains an expression; set a variable in env, and quote it"
                    yield make_finding("expression-in-shell", document, step.line_of(key), message)


def known_sessions(context: Context) -> Iterator[Finding]:
    """Require that nox has every session that a step, the planner or a machine names."""
    rule = "session"
    for document in context.workflows:
        for step in document.steps:
            for line in step.run.splitlines():
                match = _NOX.fullmatch(line.strip())
                for name in match["names"].split() if match else ():
                    if name not in context.sessions:
                        message = f"nox has no session {name!r}"
                        yield make_finding(rule, document, step.line_of("run"), message)
    planned = {*FIRST_TIERS, *NIGHTLY, *BEFORE_MACHINES, "bench", "recapture"}
    planned |= {name for names in TIER_SESSIONS.values() for name in names}
    for name in sorted(planned - set(context.sessions)):
        yield Finding("the planner", 1, rule, f"nox has no session {name!r}")
    for runner in context.fleet.runners():
        for name in runner.kind.sessions:
            if name not in context.sessions:
                message = f"[{runner.vendor.name}] cards = {runner.kind.cards}: nox has no session {name!r}"
                yield Finding(str(RUNNERS_FILE), 1, rule, message)
