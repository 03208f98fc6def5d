"""Upkeep by workflow runs: pull requests of recaptures, issues of the nightly run, expired cloud instances."""

import http.client
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from assay.errors import MachineError, UsageError
from assay.foreign_text import escape_markdown, markdown_code
from assay_runners.fleet import GITHUB_FILE
from assay_runners.workflow_run import describe_run, read_gh, run_git, run_program, run_variable

SHIPPED = Path("packages/expectations/src/assay_expectations/shipped")
# GitHub accepts bodies of at most 65,536 characters.
_MAX_CHARACTERS = 60_000


@dataclass(frozen=True)
class Proposal:
    """The content of a pull request."""

    title: str
    body: str
    files: dict[Path, Path]
    """The destination of each captured file in the checkout."""


def gather(captured: Path, root: Path, reason: str) -> Proposal:
    """Read the captured files, and describe the change of each.

    captured: a folder for each artifact, whose name ends with the number of its attempt. The newest
        attempt of a machine counts.
    Raises: UsageError if there is no file, one is not an expectation, or two machines captured the same
        one.
    """
    files: dict[Path, Path] = {}
    for file in _newest_of_each_machine(captured):
        target = root / SHIPPED / file.name
        if target in files.values():
            raise UsageError(f"{file.name} was captured twice: no machine is known to be right")
        files[file] = target
    if not files:
        raise UsageError(f"{captured}: no machine captured anything (*/captured/*.json)")
    parts = [_describe_change(file, target) for file, target in files.items()]
    body = f"Recaptured: {markdown_code(reason)}\n\n" + "\n\n".join(parts)
    if len(body) > _MAX_CHARACTERS:
        body = body[:_MAX_CHARACTERS] + "\n\n… the rest is in the run's summary.\n"
    title = f"expectations: recapture {len(files)} file{'s' if len(files) > 1 else ''}"
    return Proposal(title, body, files)


def _newest_of_each_machine(captured: Path) -> Iterator[Path]:
    newest: dict[str, tuple[int, list[Path]]] = {}
    for file in sorted(captured.rglob("captured/*.json")):
        artifact = file.relative_to(captured).parts[0]
        named = _ARTIFACT.fullmatch(artifact)
        machine, attempt = (named["machine"], int(named["attempt"])) if named else (artifact, 0)
        known, files = newest.get(machine, (-1, []))
        if attempt >= known:
            newest[machine] = (attempt, [*(files if attempt == known else []), file])
    for _, files in newest.values():
        yield from files


# The name from accelerator.yml: "expectations-nvidia-4-1" is the first attempt of nvidia-4.
_ARTIFACT = re.compile(r"(?P<machine>.+)-(?P<attempt>\d+)")


def open_pull_request(
    proposal: Proposal, root: Path, base: str, variables: Mapping[str, str]
) -> None:
    """Commit the files on a new branch, push it, and open a pull request to `base`.

    variables: the environment of the workflow run. Its number and attempt make the branch name unique.
    Raises: UsageError or MachineError if git or GitHub refuses, or outside a workflow run.
    """
    run, attempt = (run_variable(f"GITHUB_RUN_{name}", variables) for name in ("ID", "ATTEMPT"))
    branch = f"recapture/{run}-{attempt}"
    run_git(root, "checkout", "--quiet", "-b", branch)
    for file, target in proposal.files.items():
        target.write_bytes(file.read_bytes())
    run_git(root, "add", str(SHIPPED))
    who = ("-c", "user.name=assay", "-c", "user.email=assay@users.noreply.github.com")
    run_git(root, *who, "commit", "--quiet", "-m", proposal.title)
    run_program("gh", "auth", "setup-git")
    run_git(root, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
    text = ("--title", proposal.title, "--body", proposal.body)
    run_program("gh", "pr", "create", "--base", base, "--head", branch, *text)


def _describe_change(file: Path, target: Path) -> str:
    is_new = not target.is_file()
    # A new file is compared with itself, which still refuses a file that is not an expectation.
    both = [str(file if is_new else target), str(file)]
    command = [sys.executable, "-m", "assay.cli", "expect", "diff", *both, "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        raise UsageError(f"{file.name}: {''.join(done.stderr.strip().splitlines()[-1:])}")
    text = "New: this is the first capture on such a machine." if is_new else done.stdout.strip()
    return f"### {escape_markdown(file.name)}\n\n{text}"


LABEL = "nightly"
NIGHT_FAILS = "The nightly run fails"
RUNNER_IS_OLD = "The machines need a newer runner"

# GitHub sends no jobs to a runner 30 days after the next release:
# https://github.com/orgs/community/discussions/194762
_LIFETIME = timedelta(days=30)
# The time to build the images and to deploy them.
_NOTICE = timedelta(days=14)
_NUM_RELEASES = 100


def read_failures(results: str) -> list[str]:
    """Read the failed jobs from `toJSON(needs)`.

    A skipped job counts as failed if another job failed or no job succeeded: nothing ran.
    Raises: UsageError if the text has another form or no job.
    """
    try:
        jobs = {str(name): str(job["result"]) for name, job in json.loads(results).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"these are not results of jobs: {error!r}") from None
    if not jobs:
        raise UsageError("these are the results of no job")
    nothing_failed = all(result in ("success", "skipped") for result in jobs.values())
    if nothing_failed and "success" in jobs.values():
        return []
    return [f"{name}: {result}" for name, result in jobs.items() if result != "success"]


def update_issue(title: str, reasons: list[str], variables: Mapping[str, str]) -> str:
    """Open the issue or comment on it if there are reasons; otherwise close it.

    title: identifies the issue.
    variables: the environment of the workflow run.
    Returns: a sentence about the action taken.
    Raises: UsageError outside a workflow run; MachineError if GitHub refuses.
    """
    run = describe_run(variables)
    listed = read_gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number,title")
    numbers = [str(issue["number"]) for issue in listed if issue["title"] == title]
    if reasons:
        body = "\n".join([run, "", *(f"- {reason}" for reason in reasons)])
        if numbers:
            run_program("gh", "issue", "comment", numbers[0], "--body", body)
            return f"{title}: commented on issue {numbers[0]}"
        run_program("gh", "label", "create", LABEL, "--force")
        run_program("gh", "issue", "create", "--title", title, "--label", LABEL, "--body", body)
        return f"{title}: opened an issue"
    for number in numbers:
        run_program("gh", "issue", "close", number, "--comment", f"Resolved: {run}")
    return f"{title}: closed {', '.join(numbers)}" if numbers else f"{title}: no"


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


# docs/runners.md describes how to set it on an instance.
TAG = "assay-expires"
_SECONDS = 120


def find_expired(now: datetime) -> dict[str, str]:
    """Find the instances with a tag that is before `now` or is not a time. Tags default to UTC.

    Returns: the tags, by the id of the instance.
    """
    states = "Name=instance-state-name,Values=running,pending,stopped"
    filters = ("--filters", f"Name=tag-key,Values={TAG}", states)
    found = json.loads(_aws("describe-instances", *filters, "--output", "json"))
    expired = {}
    for reservation in found["Reservations"]:
        for instance in reservation["Instances"]:
            tag = next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == TAG)
            if _is_before(tag, now):
                expired[str(instance["InstanceId"])] = str(tag)
    return expired


def end_instances(ids: Collection[str]) -> None:
    """Terminate all instances.

    Each gets its own call: a call fails as a whole if it cannot terminate one of its instances.
    Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_TerminateInstances.html
    Raises: MachineError for those that the cloud or GitHub's identity service refuses.
    """
    refused = []
    for name in ids:
        try:
            _aws("terminate-instances", "--instance-ids", name)
        except MachineError as error:
            refused.append(f"{name}: {error}")
    if refused:
        raise MachineError(f"{len(refused)} of {len(ids)} still run:\n" + "\n".join(refused))


def _is_before(tag: str, now: datetime) -> bool:
    try:
        expires = datetime.fromisoformat(tag)
    except ValueError:
        return True
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)) < now


def _aws(*words: str) -> str:
    with TemporaryDirectory(prefix="assay-reaper-") as folder:
        variables = {**os.environ, **_fetch_identity(Path(folder))}
        return run_program("aws", "ec2", *words, seconds=_SECONDS, env=variables)


def _fetch_identity(folder: Path) -> dict[str, str]:
    """Fetch an OIDC token, and return the variables with which `aws` assumes the role of the run.

    A token is valid for minutes, so each call of `aws` gets its own.
    """
    url, role = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_URL"), os.environ.get("ASSAY_REAPER_ROLE")
    if not url or not role:
        return {}
    bearer = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "")
    request = urllib.request.Request(  # noqa: S310 - an address of GitHub
        f"{url}&audience=sts.amazonaws.com", headers={"Authorization": f"bearer {bearer}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
            token: Any = json.load(answer)
        value = str(token["value"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"GitHub gives the run no identity: {error!r}") from None
    file = folder / "token"
    file.write_text(value, encoding="utf-8")
    return {"AWS_ROLE_ARN": role, "AWS_WEB_IDENTITY_TOKEN_FILE": str(file)}
