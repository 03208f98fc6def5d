"""The trigger table: what each event has to start, written by hand.

Two answers are held to it: the planner's, and that of GitHub's own parser on the committed workflows.
"""

from packages.runners.tests.recorded import (
    AUTHOR,
    BOT,
    DOCUMENTS,
    MAIN,
    MERGE,
    REPOSITORY,
    SHELL,
    dispatch,
    labeled,
    merge_group,
    other,
    pull_request,
    push,
    schedule,
)
from packages.runners.tests.trigger_rows import (
    BRANCH,
    EVERY,
    FORK,
    NIGHT,
    REAP,
    REAPER,
    REFUSED,
    Case,
    by_hand,
    ci,
    ci_with_nothing_to_do,
    new_commit,
    night,
    recapture,
    smoke,
    withdrawn,
)

CASES = (
    # Pull requests: the tiers without an accelerator, for the commit that a merge would give.
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
    Case(
        "opened with a label",
        pull_request("opened", labels=("smoke:nvidia",)),
        ci(MERGE),
    ),
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
    # Labels: machines with accelerators, for the head at that time.
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
        "a second label beside a first",
        labeled("smoke:amd", labels=("smoke:nvidia", "smoke:amd")),
        smoke("assay-amd"),
    ),
    Case("a label for 1.x", labeled("smoke:nvidia", base="1.x"), smoke("assay-nvidia")),
    Case("a label of a draft", labeled("smoke:nvidia", draft=True), smoke("assay-nvidia")),
    Case(
        "a label of a fork, by a maintainer",
        labeled("smoke:nvidia", head=FORK),
        smoke("assay-nvidia"),
    ),
    Case(
        "a label of a deleted fork, by a maintainer",
        labeled("smoke:nvidia", head=None),
        smoke("assay-nvidia"),
    ),
    Case(
        "a label of a fork, by its author",
        labeled("smoke:nvidia", head=FORK, sender=AUTHOR),
        REFUSED,
        says="somebody else has to look at the commit first",
    ),
    Case(
        "a label of a deleted fork, by its author",
        labeled("smoke:nvidia", head=None, sender=AUTHOR),
        REFUSED,
        says="somebody else",
    ),
    Case(
        "a label of the own branch, by its author",
        labeled("smoke:nvidia", sender=AUTHOR),
        smoke("assay-nvidia"),
    ),
    Case(
        "a label of a fork, by its author in other letters",
        labeled("smoke:nvidia", head=FORK, sender={**AUTHOR, "login": "Author"}),
        REFUSED,
        says="somebody else",
    ),
    Case(
        "a label of the own branch, under the repository's name in other letters",
        labeled("smoke:nvidia", head=REPOSITORY.upper(), sender=AUTHOR),
        smoke("assay-nvidia"),
    ),
    Case(
        "a label of a fork whose author is gone, by a maintainer",
        labeled("smoke:nvidia", head=FORK, author=None),
        smoke("assay-nvidia"),
    ),
    Case(
        "a label by an organisation",
        labeled("smoke:nvidia", sender={"login": "assay-project", "type": "Organization"}),
        REFUSED,
        says="a person has to ask",
    ),
    Case(
        "a label by a program",
        labeled("smoke:nvidia", sender=BOT),
        REFUSED,
        says="a person has to ask",
    ),
    Case(
        "a label after closing", labeled("smoke:nvidia", state="closed"), REFUSED, says="is closed"
    ),
    Case(
        "a label of documentation",
        labeled("smoke:nvidia", changed=DOCUMENTS),
        REFUSED,
        says="only documentation changed",
    ),
    Case("an unknown vendor", labeled("smoke:nvidai"), REFUSED, says="nearest is smoke:nvidia"),
    Case(
        "an unknown number of cards",
        labeled("smoke:nvidia-3"),
        REFUSED,
        says="nearest is smoke:nvidia-4",
    ),
    Case("no vendor", labeled("smoke:"), REFUSED, says="there is no machine ''"),
    Case("an unknown tier", labeled("smok:nvidia"), REFUSED, says="nearest is smoke:nvidia"),
    Case(
        "a tier that is not run there",
        labeled("expectations:gaudi-8"),
        REFUSED,
        says="run no session",
    ),
    Case("benchmarks by label", labeled("bench:nvidia"), REFUSED, says="by hand"),
    Case("a label full of shell", labeled(f"smoke:{SHELL}"), REFUSED, says="there is no machine"),
    Case("a label of another kind", labeled("area: core"), REFUSED, says="asks for no machine"),
    # GitHub compares to the letter, but for the case.
    Case("a space after the colon", labeled("smoke: nvidia"), REFUSED, says="is smoke:nvidia"),
    Case("a space before the colon", labeled("smoke :nvidia"), REFUSED, says="is smoke:nvidia"),
    Case(
        "a space that no line breaks at",
        labeled("smoke:\u00a0nvidia"),
        REFUSED,
        says="nearest is smoke:nvidia",
    ),
    Case("a label without a colon", labeled("bug"), says="asks for no machine"),
    Case(
        "another sign than a colon",
        labeled("smoke-nvidia-4"),
        REFUSED,
        says="with a colon: smoke:nvidia-4",
    ),
    Case("a device and no colon", labeled("smoke_cuda"), REFUSED, says="colon: smoke:nvidia"),
    Case("two slips", labeled("smok:cuda"), REFUSED, says="nearest is smoke:nvidia"),
    Case("a topic named like a tier", labeled("Smoke"), REFUSED, says="asks for no machine"),
    Case("a topic", labeled("benchmarks"), REFUSED, says="asks for no machine"),
    Case("a device for a vendor", labeled("smoke:cuda-4"), REFUSED, says="is smoke:nvidia-4"),
    Case("one card", labeled("smoke:nvidia-1"), REFUSED, says="nearest is smoke:nvidia"),
    Case(
        "another tier of a machine", labeled("check:nvidia"), REFUSED, says="there are smoke:nvidia"
    ),
    Case("a slip in a benchmark", labeled("bench:nvida"), REFUSED, says="by hand"),
    Case("the machines' own label", labeled("assay-nvidia"), says="asks for no machine"),
    Case(
        "a branch full of shell, labelled",
        labeled("smoke:nvidia", branch=SHELL),
        smoke("assay-nvidia"),
    ),
    Case(
        "a title full of shell, labelled",
        labeled("smoke:nvidia", title=SHELL),
        smoke("assay-nvidia"),
    ),
    Case("unlabelled", pull_request("unlabeled", label="smoke:nvidia"), says="unlabeled"),
    Case(
        "a new commit under a label",
        pull_request("synchronize", labels=("smoke:nvidia",)),
        ci(MERGE),
    ),
    Case("the labels come off", new_commit("smoke:nvidia", "bug"), withdrawn(2)),
    Case("no label to come off", new_commit()),
    Case("a label full of shell comes off", new_commit(SHELL), withdrawn(1)),
    Case("opened, seen with write access", pull_request("opened", event="pull_request_target")),
    Case(
        "labelled, seen with write access",
        pull_request("labeled", label="smoke:all", event="pull_request_target"),
    ),
    # What is on main, and what is about to be.
    Case("a push to main", push("refs/heads/main"), ci(MAIN)),
    Case("a message full of shell", push("refs/heads/main", message=SHELL), ci(MAIN)),
    Case(
        "a push to another branch", push("refs/heads/faster"), says="no workflow waits for a push"
    ),
    Case("a push to a branch named like main", push("refs/heads/main/2"), says="no workflow waits"),
    Case("a tag", push("refs/tags/v1.0.0"), says="no workflow waits for a push"),
    Case("a tag named main", push("refs/tags/main"), says="no workflow waits for a push"),
    Case("a merge group", merge_group(), ci(MAIN)),
    Case("a merge group that is dissolved", merge_group("destroyed"), says="is destroyed"),
    # By the clock.
    Case("the night", schedule(NIGHT), night(7)),
    Case(
        "the night after no change",
        schedule(NIGHT, unchanged=True),
        night(0),
        says="nothing changed",
    ),
    Case("the reaper", schedule(REAPER), REAP),
    Case("another schedule", schedule("0 0 * * 0"), says="no workflow waits for '0 0 * * 0'"),
    # By hand.
    Case("bench", dispatch("bench.yml", vendor="nvidia"), by_hand("bench.yml", "assay-nvidia")),
    Case(
        "bench on the CPU", dispatch("bench.yml", vendor="cpu"), by_hand("bench.yml", "assay-cpu")
    ),
    Case(
        "bench of a model with a baseline",
        dispatch(
            "bench.yml", vendor="amd", suite="core", model="org/model", baseline="kept/a.json"
        ),
        by_hand("bench.yml", "assay-amd"),
    ),
    Case(
        "bench of an unknown vendor",
        dispatch("bench.yml", vendor="nvidai"),
        by_hand("bench.yml"),
        says="nearest is nvidia",
    ),
    Case(
        "bench everywhere",
        dispatch("bench.yml", vendor="all"),
        by_hand("bench.yml"),
        says="name one machine",
    ),
    Case(
        "bench where it is not run",
        dispatch("bench.yml", vendor="gaudi-8"),
        by_hand("bench.yml"),
        says="no session of bench",
    ),
    Case(
        "bench of a model like an option",
        dispatch("bench.yml", vendor="cpu", model="--output=/etc"),
        by_hand("bench.yml"),
        says="begins with a dash",
    ),
    Case(
        "bench of a model full of shell",
        dispatch("bench.yml", vendor="cpu", model=SHELL),
        by_hand("bench.yml", "assay-cpu"),
    ),
    Case(
        "recapture",
        dispatch(
            "recapture.yml",
            models="micro:llama micro:qwen3",
            vendors="nvidia spyre",
            reason="torch 2.13",
        ),
        recapture("assay-nvidia", "assay-spyre"),
    ),
    Case(
        "recapture everywhere",
        dispatch("recapture.yml", models="micro:llama", vendors="all", reason="a new format"),
        recapture(*EVERY),
    ),
    Case(
        "recapture of an unknown vendor",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu tpu", reason="x"),
        by_hand("recapture.yml"),
        says="there is no machine 'tpu'",
    ),
    Case(
        "recapture with a reason full of shell",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason=SHELL),
        recapture("assay-cpu"),
    ),
    Case(
        "recapture with an option for a model",
        dispatch("recapture.yml", models="micro:llama --approved-by=me", vendors="cpu", reason="x"),
        by_hand("recapture.yml"),
        says="begins with a dash",
    ),
    Case(
        "recapture where no expectations are run",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu gaudi-8", reason="x"),
        by_hand("recapture.yml"),
        says="the machines of gaudi-8 run no session of expectations",
    ),
    Case(
        "recapture without a reason",
        dispatch("recapture.yml", models="micro:llama", vendors="cpu", reason="  "),
        by_hand("recapture.yml"),
        says="needs models, vendors and a reason",
    ),
    Case("the night by hand", dispatch("nightly.yml"), night(7)),
    Case(
        "the night by hand, for a branch",
        dispatch("nightly.yml", ref=BRANCH),
        night(7, ref=BRANCH),
    ),
    Case(
        "bench of a branch",
        dispatch("bench.yml", ref=BRANCH, vendor="nvidia"),
        by_hand("bench.yml", "assay-nvidia"),
    ),
    Case(
        "bench of a tag",
        dispatch("bench.yml", ref="refs/tags/v1.0.0", vendor="nvidia"),
        by_hand("bench.yml", "assay-nvidia"),
    ),
    Case(
        "bench with a suite and no model",
        dispatch("bench.yml", vendor="nvidia", suite="core"),
        by_hand("bench.yml"),
        says="a suite is for a model",
    ),
    Case(
        "bench with a baseline and no model",
        dispatch("bench.yml", vendor="nvidia", baseline="kept/a.json"),
        by_hand("bench.yml"),
        says="a baseline is for a model",
    ),
    Case(
        "recapture of a branch",
        dispatch(
            "recapture.yml", ref=BRANCH, models="micro:llama", vendors="cpu", reason="torch 2.13"
        ),
        by_hand("recapture.yml"),
        says="start it from refs/heads/main",
    ),
    Case("the reaper by hand", dispatch("reaper.yml"), REAP),
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
