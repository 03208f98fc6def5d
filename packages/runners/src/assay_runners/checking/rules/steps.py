"""The commands and the actions of steps."""

import re
from collections.abc import Iterator

from assay_runners.checking.context import Context, Problem, called_file
from assay_runners.checking.workflow_files.documents import Document
from assay_runners.fleet.reading import RUNNERS_FILE
from assay_runners.planning.choices import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY
from assay_runners.planning.labels import TIER_SESSIONS

_NOX = re.compile(r"(python3 -m )?nox -s (?P<names>[\w -]+?)( -- .+)?")
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def pinned_actions(document: Document, context: Context) -> Iterator[Problem]:
    """Require the commit and the version of each foreign action, and the running commit for our own."""
    github = context.fleet.github
    used = [(step.uses, step.line_of("uses")) for step in document.steps if step.uses]
    used += [(job.uses, job.line_of("uses")) for job in document.jobs.values() if job.uses]
    for uses, line in used:
        if uses == github.check_action or called_file(uses) == "accelerator.yml":
            continue  # the rule `machine-guard` checks the branch of accelerator.yml
        if uses.startswith(f"{github.own}.github/"):
            continue
        if uses.startswith(("./", "$/")):
            message = f"{uses}: for the server {github.server}, {github.own} names our own files"
            yield line, message
        elif not _PINNED.fullmatch(uses):
            yield line, f"{uses} can become other code; write its commit, 40 digits"
        elif not _VERSION.search(document.text.split("\n")[line - 1]):
            yield line, f"{uses} has no version; write it after the commit: # v1.2.3"


def no_expressions_in_commands(document: Document, _: Context) -> Iterator[Problem]:
    """Require that expressions reach commands through `env`: their values may contain shell code."""
    for step in document.steps:
        places = {"run": step.run, "shell": str(step.raw.get("shell") or "")}
        places["script"] = str(step.inputs.get("script") or "")
        for key, text in places.items():
            if "${{" in text:
                message = f"`{key}` contains an expression; set a variable in env, and quote it"
                yield step.line_of(key), message


def known_sessions(document: Document, context: Context) -> Iterator[Problem]:
    """Require that nox has every session that a step names."""
    for step in document.steps:
        for line in step.run.splitlines():
            match = _NOX.fullmatch(line.strip())
            for name in match["names"].split() if match else ():
                if name not in context.sessions:
                    yield step.line_of("run"), f"nox has no session {name!r}"


def find_unknown_sessions(context: Context) -> Iterator[tuple[str, str]]:
    """Find the sessions of the planner and of machines that nox does not have, with their places."""
    planned = {*FIRST_TIERS, *NIGHTLY, *BEFORE_MACHINES, "bench", "recapture"}
    planned |= {name for names in TIER_SESSIONS.values() for name in names}
    for name in sorted(planned - set(context.sessions)):
        yield "the planner", f"nox has no session {name!r}"
    for runner in context.fleet.runners():
        for name in runner.kind.sessions:
            if name not in context.sessions:
                place = f"[{runner.vendor.name}] cards = {runner.kind.cards}"
                yield str(RUNNERS_FILE), f"{place}: nox has no session {name!r}"
