"""The pull request of a recapture: from the files that machines captured."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay_runners.workflow_run.commits import run_git
from assay_runners.workflow_run.github import gh

SHIPPED = Path("packages/expectations/src/assay_expectations/shipped")
# GitHub takes bodies of at most 65,536 characters.
_MOST_CHARACTERS = 60_000


@dataclass(frozen=True)
class Proposal:
    """What a pull request would contain.

    files: each captured file, and where it goes in the checkout.
    """

    title: str
    body: str
    files: dict[Path, Path]


def gather(captured: Path, root: Path, reason: str) -> Proposal:
    """Read the captured files, and say what each changes.

    Raises: UsageError if there is none, or two machines captured the same.
    """
    files: dict[Path, Path] = {}
    for file in sorted(captured.rglob("*.json")):
        if file.parent.name != "captured":
            continue
        target = root / SHIPPED / file.name
        if target in files.values():
            raise UsageError(
                f"{file.name} was captured twice: by which machine it is right is not known"
            )
        files[file] = target
    if not files:
        raise UsageError(f"{captured}: no machine captured anything (*/captured/*.json)")
    parts = [_describe(file, target) for file, target in files.items()]
    body = f"Captured anew: {_quoted(reason)}\n\n" + "\n\n".join(parts)
    if len(body) > _MOST_CHARACTERS:
        body = body[:_MOST_CHARACTERS] + "\n\n… the rest is in the run's summary.\n"
    return Proposal(f"expectations: {len(files)} captured anew", body, files)


def open_pull_request(proposal: Proposal, root: Path) -> None:
    """Commit the files on a branch of their own, push it, and open a pull request to main.

    Raises: UsageError or MachineError if git or GitHub refuses.
    """
    branch = f"recapture/{run_git(root, 'rev-parse', '--short', 'HEAD')}-{len(proposal.files)}"
    run_git(root, "checkout", "--quiet", "-b", branch)
    for file, target in proposal.files.items():
        target.write_bytes(file.read_bytes())
    run_git(root, "add", str(SHIPPED))
    who = ("-c", "user.name=assay", "-c", "user.email=assay@users.noreply.github.com")
    run_git(root, *who, "commit", "--quiet", "-m", proposal.title)
    gh("auth", "setup-git")
    run_git(root, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
    gh("pr", "create", "--head", branch, "--title", proposal.title, "--body", proposal.body)


def _describe(file: Path, target: Path) -> str:
    if not target.is_file():
        return f"### {file.name}\n\nNew: nothing was captured on such a machine before."
    command = [
        sys.executable,
        "-m",
        "assay.cli",
        "expect",
        "diff",
        str(target),
        str(file),
        "--markdown",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        raise UsageError(f"{file.name}: {done.stderr.strip().splitlines()[-1:]}")
    return f"### {file.name}\n\n{done.stdout.strip()}"


def _quoted(text: str) -> str:
    one_line = " ".join(text.split())
    return f"`{one_line.replace('`', chr(39))}`"
