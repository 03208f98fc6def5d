"""Whose code an action or a called workflow is."""

import re
from collections.abc import Iterator

from assay_runners.checking.context import Context, make_finding
from assay_runners.checking.findings import Finding
from assay_runners.checking.workflow_files.reach import called_file

_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_OWN = "$/.github/"
_VERSION = re.compile(r"# v\d+\.\d+\.\d+\s*$")


def pinned_actions(context: Context) -> Iterator[Finding]:
    """An action is named by its commit, with the version beside it; our own by `$/`."""
    rule = "pin"
    for document in context.documents:
        used = [(step.uses, step.line_of("uses")) for step in document.steps if step.uses]
        used += [(job.uses, job.line_of("uses")) for job in document.jobs.values() if job.uses]
        for uses, line in used:
            if uses.startswith(_OWN) or called_file(uses) == "accelerator.yml":
                continue  # `machine-guard` says at which branch that is called
            if uses.startswith("./"):
                message = f"{uses} is the checkout's; write $/ for the file of the running workflow"
                yield make_finding(rule, document, line, message)
            elif not _PINNED.fullmatch(uses):
                message = f"{uses} can become other code; name its commit, 40 digits"
                yield make_finding(rule, document, line, message)
            elif not _VERSION.search(document.lines[line - 1]):
                message = f"{uses} does not say its version; write it behind: # v1.2.3"
                yield make_finding(rule, document, line, message)
