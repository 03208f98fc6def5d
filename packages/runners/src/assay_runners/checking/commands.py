"""What steps run."""

import re
from collections.abc import Iterator

from assay_runners.checking.context import Context, found
from assay_runners.checking.findings import Finding
from assay_runners.checking.reading import Step
from assay_runners.planning.choices import BEFORE_MACHINES, FIRST_TIERS, NIGHTLY
from assay_runners.planning.labels import TIER_SESSIONS

_NOX = r"(python3 -m )?nox -s (?P<names>[\w -]+?|\"\$SESSION\")( -- .+)?"
_INSTALLING = "python3 -m pip install --constraint constraints.txt nox"
_COMPOSING = re.compile(_NOX)
# Commands that can live in neither nox nor assay, each with its reason.
_OTHERS = {
    'test "$(git rev-parse HEAD)" = "$SHA"': "the commit is compared before its code runs",
    'test "$PLAN" = success': "the aggregate of jobs is known to the workflow alone",
    'test "$TESTS $SMOKE" = "success success"': "the same",
    'test "$RAN" = success': "the same",
    'test "$GITHUB_EVENT_NAME" = workflow_dispatch': "a job that waits for reviewers has a step",
    'gh api --method DELETE "repos/$REPOSITORY/issues/$NUMBER/labels/$LABEL"': (
        "it may write, and so runs nothing of the pull request"
    ),
}
# Of actions that other repositories use: they have no nox.
_OF_ACTIONS = re.compile(
    rf"{re.escape(_INSTALLING)}|python3 -m pip install \"\$GITHUB_ACTION_PATH/[\w./-]+\""
    r"|python3 -m assay\.cli .+"
)


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
                    yield found("expression-in-shell", document, step.line_of(key), message)


def composing_commands(context: Context) -> Iterator[Finding]:
    """A step runs nox or assay: logic belongs into Python, where it is tested."""
    for document in context.documents:
        allowed = _OF_ACTIONS if document in context.actions else _COMPOSING
        for step in document.steps:
            for line in _commands(step):
                if not (allowed.fullmatch(line) and _is_one_command(line)) and line not in _OTHERS:
                    message = f"`{line}` is neither nox nor assay, nor one of the commands that may stand here"
                    yield found("command", document, step.line_of("run"), message)


def known_sessions(context: Context) -> Iterator[Finding]:
    """Every session that a step, the planner or a machine names is one that nox has."""
    rule = "session"
    for document in context.workflows:
        for step in document.steps:
            for line in _commands(step):
                for name in _sessions_of(line):
                    if name not in context.sessions:
                        message = f"nox has no session {name!r}"
                        yield found(rule, document, step.line_of("run"), message)
    planned = {*FIRST_TIERS, *NIGHTLY, *BEFORE_MACHINES, "recapture"}
    planned |= {name for names in TIER_SESSIONS.values() for name in names}
    machines = {name for one in context.fleet.runners() for name in one.kind.sessions}
    for file, names in (("the planner", planned), ("runners/runners.toml", machines)):
        for name in sorted(names - set(context.sessions)):
            yield Finding(file, 1, rule, f"nox has no session {name!r}")


def _commands(step: Step) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", step.run)
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _is_one_command(line: str) -> bool:
    """Whether a shell sees one command: nothing is joined, redirected or substituted."""
    outside = re.sub(r'"\$[A-Z_]+(/[\w./-]+)?"', "", line)
    return not re.search(r"[;&|<>`$()]", outside)


def _sessions_of(line: str) -> list[str]:
    match = re.fullmatch(_NOX, line)
    if match is None or match["names"].startswith('"'):
        return []
    return match["names"].split()
