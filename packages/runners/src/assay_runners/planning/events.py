"""A GitHub event, and the facts of its payload that a plan depends on."""

from typing import Any

from pydantic import BaseModel, ConfigDict

Payload = dict[str, Any]


class Event(BaseModel):
    """An event as a workflow run sees it."""

    model_config = ConfigDict(frozen=True)

    name: str
    """GITHUB_EVENT_NAME."""
    payload: Payload
    """The object in the file GITHUB_EVENT_PATH."""
    sha: str
    """GITHUB_SHA. For a pull request this is the merge commit that GitHub made, not the head."""
    ref: str = ""
    """GITHUB_REF."""
    changed: tuple[str, ...] | None = None
    """The files that differ from the base; None if unknown."""
    unchanged_since_success: bool = False
    """The last successful run of this workflow ran the same commit."""

    @property
    def action(self) -> str:
        """The activity of a pull request event: "labeled", "synchronize"; "" for other events."""
        return str(self.payload.get("action") or "")

    @property
    def workflow(self) -> str:
        """The file name of the workflow that a dispatch starts; "" for other events."""
        return str(self.payload.get("workflow") or "").rsplit("/", 1)[-1]

    @property
    def pull_request(self) -> Payload:
        """The pull request; empty for other events."""
        return self.payload.get("pull_request") or {}

    @property
    def head_sha(self) -> str:
        """The newest commit of the pull request when the event happened."""
        return str(self.pull_request.get("head", {}).get("sha", ""))

    @property
    def label(self) -> str:
        """The label that was just added to the pull request or removed from it."""
        return str((self.payload.get("label") or {}).get("name", ""))

    @property
    def is_from_fork(self) -> bool:
        """The pull request comes from another repository, which may be deleted."""
        head = self.pull_request.get("head", {}).get("repo") or {}
        base = self.pull_request.get("base", {}).get("repo") or {}
        return str(head.get("full_name")).casefold() != str(base.get("full_name")).casefold()

    @property
    def sender(self) -> Payload:
        """The account that caused the event."""
        return self.payload.get("sender") or {}

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs of a dispatch that are not blank."""
        given = self.payload.get("inputs") or {}
        return {name: str(value) for name, value in given.items() if str(value or "").strip()}
