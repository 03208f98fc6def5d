"""The list of all rules, and the function that applies them."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from assay_runners.checking.context import Context, Finding
from assay_runners.checking.rules import checkouts, machines, permissions, steps, triggers
from assay_runners.checking.rules.vocabulary import known_words
from assay_runners.checking.workflow_files.call_graph import CallGraph
from assay_runners.checking.workflow_files.documents import read_documents
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
    steps.pinned_actions,
    steps.no_expressions_in_commands,
    steps.known_sessions,
    triggers.known_events,
    triggers.schedules,
    triggers.called_alone,
    triggers.labels_without_new_commits,
    triggers.no_foreign_code_with_write_access,
    machines.known_machines,
    machines.guarded_machines,
    machines.known_needs,
    machines.tests_first,
    machines.timeouts,
    machines.concurrency,
    known_words,
)


def check_workflows(root: Path, fleet: Fleet, sessions: Collection[str]) -> list[Finding]:
    """Check the workflows and actions below `root`.

    sessions: those of the noxfile.
    Returns: the findings, sorted.
    Raises: UsageError if there is no workflow, or a file is not YAML.
    """
    workflows, actions = map(tuple, read_documents(root))
    special_syntax = [
        Finding(document.file, line, "plain-yaml", f"{kind} is not allowed; write it out")
        for document in (*workflows, *actions)
        for line, kind in document.special_syntax
    ]
    if special_syntax:
        return sorted(special_syntax)  # the values behind aliases were not read
    context = Context(workflows, actions, CallGraph(workflows), fleet, sessions)
    empty = [
        Finding(document.file, 1, "empty", "it has no jobs or no event")
        for document in workflows
        if not document.jobs or not document.events
    ]
    found = {*empty, *(finding for rule in RULES for finding in rule(context))}
    # On a line that another rule names, the vocabulary says nothing new.
    named = {(one.file, one.line) for one in found if one.rule != "vocabulary"}
    return sorted(
        one for one in found if one.rule != "vocabulary" or (one.file, one.line) not in named
    )
