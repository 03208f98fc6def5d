"""What steps run."""

import re
from collections.abc import Iterator

from assay_runners.checking.context import Context, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.fleet.reading import RUNNERS_FILE
from assay_runners.planning.choices import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY
from assay_runners.planning.labels import TIER_SESSIONS

_NOX = re.compile(r"(python3 -m )?nox -s (?P<names>[\w -]+?)( -- .+)?")


def no_expressions_in_commands(context: Context) -> Iterator[Finding]:
    """An expression reaches a command through `env` alone: its value may hold any shell."""
    for document in context.documents:
        for step in document.steps:
            places = {"run": step.run, "shell": str(step.raw.get("shell") or "")}
            places["script"] = str(step.given.get("script") or "")
            for key, text in places.items():
                if "${{" in text:
                    message = (
                        f"an expression stands in `{key}`; set a variable in env, and quote it"
                    )
                    yield make_finding("expression-in-shell", document, step.line_of(key), message)


def known_sessions(context: Context) -> Iterator[Finding]:
    """Every session that a step, the planner or a machine names is one that nox has."""
    rule = "session"
    for document in context.workflows:
        for step in document.steps:
            for line in step.run.splitlines():
                for name in _sessions_of(line):
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


def _sessions_of(line: str) -> list[str]:
    match = _NOX.fullmatch(line.strip())
    return match["names"].split() if match else []
