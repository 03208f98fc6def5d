"""The day from which GitHub sends no jobs to the runner version of the images."""

from datetime import datetime, timedelta

from assay_runners.fleet.reading import GITHUB_FILE
from assay_runners.workflow_run.programs import read_gh

# GitHub sends no jobs to a runner 30 days after the next release:
# https://github.com/orgs/community/discussions/194762
_LIFETIME = timedelta(days=30)
# The time to build the images and to deploy them.
_NOTICE = timedelta(days=14)
_NUM_RELEASES = 100


def find_outdated_runner(pinned: str, now: datetime) -> str:
    """Say why the images need a newer runner within two weeks; "" if they do not.

    pinned: their version, such as "2.338.0".
    now: with a time zone.
    Raises: MachineError if GitHub does not answer.
    """
    releases = read_gh("api", f"repos/actions/runner/releases?per_page={_NUM_RELEASES}")
    published = {
        str(release["tag_name"]).removeprefix("v"): datetime.fromisoformat(release["published_at"])
        for release in releases
        if not (release["draft"] or release["prerelease"])
    }
    if pinned not in published:
        return (
            f"{GITHUB_FILE}: runner {pinned} is not among the last {_NUM_RELEASES} releases of"
            " https://github.com/actions/runner"
        )
    newer = {version: date for version, date in published.items() if date > published[pinned]}
    if not newer:
        return ""
    deadline = min(newer.values()) + _LIFETIME
    if now < deadline - _NOTICE:
        return ""
    newest = max(newer, key=newer.__getitem__)
    return (
        f"{GITHUB_FILE}: GitHub sends no jobs to runner {pinned} from {deadline:%Y-%m-%d} on."
        f" Write {newest} and the digest of its image there, run `assay runners render`, and"
        " rebuild the images"
    )
