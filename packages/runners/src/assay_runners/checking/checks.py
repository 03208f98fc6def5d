"""All rules, and what they find."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from assay_runners.checking.context import Context
from assay_runners.checking.findings import Finding
from assay_runners.checking.rules import checkouts, commands, machines, permissions, pins, triggers
from assay_runners.checking.rules.vocabulary import known_words
from assay_runners.checking.workflow_files.documents import read_documents
from assay_runners.checking.workflow_files.reach import Reach
from assay_runners.fleet.entries import Fleet

Rule = Callable[[Context], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    permissions.permissions_of_workflows,
    permissions.no_write_but_listed,
    permissions.no_secret_for_others,
    permissions.no_caches,
    checkouts.exact_commits,
    checkouts.compared_commits,
    checkouts.no_branch_names,
    checkouts.no_kept_credentials,
    pins.pinned_actions,
    triggers.known_events,
    triggers.schedules,
    triggers.called_alone,
    triggers.labels_without_new_commits,
    triggers.nothing_of_others_with_write_access,
    commands.no_expressions_in_commands,
    commands.known_sessions,
    machines.known_machines,
    machines.guarded_machines,
    machines.known_needs,
    machines.tests_first,
    machines.timeouts,
    machines.concurrency,
    known_words,
)


def check_workflows(root: Path, fleet: Fleet, sessions: Collection[str]) -> list[Finding]:
    """What the workflows and actions below `root` have that they must not have.

    sessions: those that nox has.
    Raises: UsageError if there is no workflow, or a file cannot be read as one.
    """
    workflows, actions = map(tuple, read_documents(root))
    unplain = [
        Finding(document.file, line, "plain-yaml", f"{what} stands here; write it out")
        for document in (*workflows, *actions)
        for line, what in document.unplain
    ]
    if unplain:
        return sorted(unplain)  # what they stand for was not read
    context = Context(workflows, actions, Reach(workflows), fleet, sessions)
    empty = [
        Finding(document.file, 1, "empty", "it has no jobs, or no event")
        for document in workflows
        if not document.jobs or not document.events
    ]
    found = {*empty, *(finding for rule in RULES for finding in rule(context))}
    # What a rule of its own speaks of needs no second line.
    spoken_of = {(one.file, one.line) for one in found if one.rule != "vocabulary"}
    return sorted(
        one for one in found if one.rule != "vocabulary" or (one.file, one.line) not in spoken_of
    )
