"""An event of GitHub, and what its payload says to a planner."""

from typing import Any

from pydantic import BaseModel, ConfigDict

Payload = dict[str, Any]


class Event(BaseModel):
    """An event as a workflow run sees it.

    name: as GITHUB_EVENT_NAME has it.
    payload: the object of the file that GITHUB_EVENT_PATH names.
    sha: GITHUB_SHA. Of a pull request it is a merge commit that GitHub made, not the head.
    ref: GITHUB_REF.
    changed: the files that differ from the base; None where that is not known.
    unchanged_since_success: whether the last successful run of this workflow was of the same commit.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    payload: Payload
    sha: str
    ref: str = ""
    changed: tuple[str, ...] | None = None
    unchanged_since_success: bool = False

    @property
    def action(self) -> str:
        """What happened to the pull request: "labeled", "synchronize"; "" for other events."""
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
        """The label that was just given to the pull request, or taken off."""
        return str((self.payload.get("label") or {}).get("name", ""))

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels that the pull request has."""
        return tuple(str(label["name"]) for label in self.pull_request.get("labels") or ())

    @property
    def is_from_fork(self) -> bool:
        """Whether the pull request comes from another repository, one that is deleted included."""
        head = self.pull_request.get("head", {}).get("repo") or {}
        base = self.pull_request.get("base", {}).get("repo") or {}
        return str(head.get("full_name")).casefold() != str(base.get("full_name")).casefold()

    @property
    def sender(self) -> Payload:
        """Who caused the event."""
        return self.payload.get("sender") or {}

    @property
    def inputs(self) -> dict[str, str]:
        """What a dispatch was given, without what was left empty."""
        given = self.payload.get("inputs") or {}
        return {name: str(value) for name, value in given.items() if str(value or "").strip()}
