"""The trigger table: the jobs that each event must start, written by hand.

Tests compare it with the planner, and with GitHub's own parser on the committed workflows.
"""

from typing import Any

from packages.runners.tests.dispatch_table import BY_HAND
from packages.runners.tests.event_payloads import (
    AUTHOR,
    BOT,
    DOCUMENTS,
    MAIN,
    MERGE,
    REPOSITORY,
    SHELL,
    labeled,
    merge_group,
    other,
    pull_request,
    push,
    schedule,
)
from packages.runners.tests.fleet import GITHUB
from packages.runners.tests.trigger_rows import (
    BUILD,
    CONFLICTS,
    EVERY,
    FORK,
    PLAN_ALONE,
    PUBLISH,
    REAP,
    SITE,
    Case,
    ci,
    ci_with_nothing_to_do,
    new_commit,
    night,
    smoke,
    withdrawn,
)

# Labels that start a plan and no machine, and what the plan says.
REFUSED_LABELS = {
    "smoke:nvidai": "nearest is smoke:nvidia",
    "smoke:nvidia-3": "nearest is smoke:nvidia-4",
    "smoke:nvidia-1": "nearest is smoke:nvidia",
    "smoke:": "there is no machine ''",
    f"smoke:{SHELL}": "there is no machine",
    "smok:nvidia": "nearest is smoke:nvidia",
    "smok:cuda": "nearest is smoke:nvidia",
    "smoke:cuda-4": "is smoke:nvidia-4",
    "smoke_cuda": "colon: smoke:nvidia",
    "smoke-nvidia-4": "with a colon: smoke:nvidia-4",
    # GitHub ignores case and nothing else.
    "smoke: nvidia": "is smoke:nvidia",
    "smoke :nvidia": "is smoke:nvidia",
    "smoke:\u00a0nvidia": "nearest is smoke:nvidia",
    "expectations:gaudi-8": "run no session",
    "check:nvidia": "there are smoke:nvidia",
    "bench:nvidia": "by hand",
    "bench:nvida": "by hand",
    "Smoke": "asks for no machine",
    "benchmarks": "asks for no machine",
    "area:nvidia": "asks for no machine",
    "area: core": "asks for no machine",
}
# Labels of a pull request that starts machines in spite of these facts.
HARMLESS_FACTS: dict[str, dict[str, Any]] = {
    "for 1.x": {"base": "1.x"},
    "of a draft": {"draft": True},
    "of a fork, by a maintainer": {"head": FORK},
    "of a deleted fork, by a maintainer": {"head": None},
    "of the own branch, by its author": {"sender": AUTHOR},
    "of the own branch, under the repository's name in other letters": {
        "head": REPOSITORY.upper(), "sender": AUTHOR,
    },
    "of a fork whose author is gone, by a maintainer": {"head": FORK, "author": None},
    "of a branch full of shell": {"branch": SHELL},
    "of a title full of shell": {"title": SHELL},
}  # fmt: skip
# Facts for which no machine starts, and what the plan says.
REFUSED_FACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "of a fork, by its author": (
        "somebody else has to look at the commit first", {"head": FORK, "sender": AUTHOR},
    ),
    "of a deleted fork, by its author": ("somebody else", {"head": None, "sender": AUTHOR}),
    "of a fork, by its author in other letters": (
        "somebody else", {"head": FORK, "sender": {**AUTHOR, "login": "Author"}},
    ),
    "by an organization": (
        "a person has to ask", {"sender": {"login": "somebody", "type": "Organization"}},
    ),
    "by a program": ("a person has to ask", {"sender": BOT}),
    "after closing": ("is closed", {"state": "closed"}),
    "of documentation": ("only documentation changed", {"changed": DOCUMENTS}),
}  # fmt: skip

CASES = (
    # Pull requests: the tiers without an accelerator, for the merge commit.
    Case("opened", pull_request("opened"), ci(MERGE)),
    Case("opened as a draft", pull_request("opened", draft=True), ci(MERGE)),
    Case("reopened", pull_request("reopened"), ci(MERGE)),
    Case("a new commit", pull_request("synchronize"), ci(MERGE)),
    Case("opened from a fork", pull_request("opened", head=FORK, sender=AUTHOR), ci(MERGE)),
    Case(
        "from a fork that is deleted", pull_request("opened", head=None, sender=AUTHOR), ci(MERGE)
    ),
    Case("a title full of shell", pull_request("opened", title=SHELL), ci(MERGE)),
    Case("a branch full of shell", pull_request("opened", branch=SHELL), ci(MERGE)),
    Case("opened by a program", pull_request("opened", sender=BOT, author=BOT), ci(MERGE)),
    Case(
        "documentation alone",
        pull_request("opened", changed=DOCUMENTS),
        ci_with_nothing_to_do(MERGE),
        says="nothing to do: only documentation changed",
    ),
    Case(
        "documentation alone, by a new commit",
        pull_request("synchronize", changed=DOCUMENTS),
        ci_with_nothing_to_do(MERGE),
        says="only documentation",
    ),
    Case(
        "documentation and a schema",
        pull_request("opened", changed=("docs/a.md", "docs/a.json")),
        ci(MERGE),
    ),
    Case(
        "Markdown of a package",
        pull_request("opened", changed=("packages/core/README.md",)),
        ci(MERGE),
    ),
    Case("no file is known", pull_request("opened", changed=None), ci(MERGE)),
    Case("no file changed", pull_request("opened", changed=()), ci(MERGE)),
    Case("edited", pull_request("edited"), says="edited"),
    Case("opened with a label", pull_request("opened", labels=("smoke:nvidia",)), ci(MERGE)),
    Case(
        "aimed at another branch",
        pull_request("edited", changes={"base": {"ref": {"from": "release/1.x"}}}),
        says="edited",
    ),
    Case(
        "merged under a label",
        pull_request("closed", state="closed", labels=("smoke:nvidia",)),
        says="closed",
    ),
    Case("opened for a release", pull_request("opened", base="release/1.x"), ci(MERGE)),
    Case("closed", pull_request("closed", state="closed"), says="closed"),
    Case("ready for review", pull_request("ready_for_review"), says="ready_for_review"),
    # Labels: machines with accelerators, for the current head.
    Case("smoke on one vendor", labeled("smoke:nvidia"), smoke("assay-nvidia")),
    Case("smoke on four cards", labeled("smoke:nvidia-4"), smoke("assay-nvidia-4")),
    Case("smoke on the CPU", labeled("smoke:cpu"), smoke("assay-cpu")),
    Case(
        "smoke on a vendor whose image is not public", labeled("smoke:spyre"), smoke("assay-spyre")
    ),
    Case("smoke on every vendor", labeled("smoke:all"), smoke(*EVERY)),
    Case("a label in capitals", labeled("Smoke:NVIDIA"), smoke("assay-nvidia")),
    Case("expectations alone", labeled("expectations:spyre"), smoke("assay-spyre")),
    Case("expectations everywhere", labeled("expectations:all"), smoke(*EVERY)),
    Case(
        "a second label",
        labeled("smoke:amd", labels=("smoke:nvidia", "smoke:amd")),
        smoke("assay-amd"),
    ),
    *(
        Case(f"a label {name}", labeled("smoke:nvidia", **facts), smoke("assay-nvidia"))
        for name, facts in HARMLESS_FACTS.items()
    ),
    *(
        Case(f"a label {name}", labeled("smoke:nvidia", **facts), PLAN_ALONE, says=says)
        for name, (says, facts) in REFUSED_FACTS.items()
    ),
    *(
        Case(f"the label {label}", labeled(label), PLAN_ALONE, says=says)
        for label, says in REFUSED_LABELS.items()
    ),
    Case("a label without a colon", labeled("bug"), says="asks for no machine"),
    Case("the machines' own label", labeled("assay-nvidia"), says="asks for no machine"),
    Case("unlabeled", pull_request("unlabeled", label="smoke:nvidia"), says="unlabeled"),
    Case(
        "a new commit under a label",
        pull_request("synchronize", labels=("smoke:nvidia",)),
        ci(MERGE),
    ),
    Case("the labels are removed", new_commit("smoke:nvidia", "bug"), (*withdrawn(2), CONFLICTS)),
    Case("no label to remove", new_commit(), (CONFLICTS,)),
    Case("a label full of shell is removed", new_commit(SHELL), (*withdrawn(1), CONFLICTS)),
    Case(
        "opened, seen with write access",
        pull_request("opened", event="pull_request_target"),
        (CONFLICTS,),
    ),
    Case(
        "labeled, seen with write access",
        pull_request(
            "labeled", label="smoke:all", labels=("smoke:all",), event="pull_request_target"
        ),
        (CONFLICTS,),
    ),
    Case(
        "a topic, seen with write access",
        pull_request("labeled", label="bug", labels=("bug",), event="pull_request_target"),
    ),
    Case("closed, seen with write access", pull_request("closed", event="pull_request_target")),
    # Pushes and the merge queue.
    Case("a push to main", push("refs/heads/main"), (*ci(MAIN), *SITE)),
    Case("a message full of shell", push("refs/heads/main", message=SHELL), (*ci(MAIN), *SITE)),
    Case(
        "a push to another branch", push("refs/heads/faster"), says="no workflow waits for a push"
    ),
    Case("a push to a branch named like main", push("refs/heads/main/2"), says="no workflow waits"),
    Case(
        "the tag of a version", push("refs/tags/v1.0.0"), (BUILD, PUBLISH), says="has its own jobs"
    ),
    Case("another tag", push("refs/tags/1.0.0"), says="no workflow waits for a push"),
    Case("a branch named like a release", push("refs/heads/v1.0.0"), says="no workflow waits"),
    Case("a tag named main", push("refs/tags/main"), says="no workflow waits for a push"),
    Case("a merge group", merge_group(), ci(MAIN)),
    Case("a merge group that is dissolved", merge_group("destroyed"), says="is destroyed"),
    # Schedules.
    Case("the night", schedule(GITHUB.nightly), night(8)),
    Case(
        "the night after no change",
        schedule(GITHUB.nightly, unchanged=True),
        night(0),
        says="nothing changed",
    ),
    Case("the reaper", schedule(GITHUB.reaper), REAP),
    Case("another schedule", schedule("0 0 * * 0"), says="no workflow waits for '0 0 * * 0'"),
    *BY_HAND,
    # Events that start nothing.
    Case(
        "a comment",
        other("issue_comment", action="created", comment={"body": "/smoke nvidia"}),
        says="no workflow",
    ),
    Case("a review", other("pull_request_review", action="submitted"), says="no workflow"),
    Case("a workflow that ended", other("workflow_run", action="completed"), says="no workflow"),
    Case("a release", other("release", action="published"), says="no workflow"),
    Case("another program", other("repository_dispatch", action="smoke"), says="no workflow"),
)
