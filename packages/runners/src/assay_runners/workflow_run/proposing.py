"""The pull request of a recapture: from the files that machines captured."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay.foreign_text import escape_markdown, markdown_code
from assay_runners.workflow_run.git import run_git
from assay_runners.workflow_run.github import gh
from assay_runners.workflow_run.outputs import run_variable

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

    captured: a folder for each artifact, whose name ends in the number of the attempt that made it;
        of a machine that captured in several attempts the newest counts.
    Raises: UsageError if there is none, one is no expectation, or two machines captured the same.
    """
    files: dict[Path, Path] = {}
    for file in _newest_of_each_machine(captured):
        target = root / SHIPPED / file.name
        if target in files.values():
            raise UsageError(
                f"{file.name} was captured twice: by which machine it is right is not known"
            )
        files[file] = target
    if not files:
        raise UsageError(f"{captured}: no machine captured anything (*/captured/*.json)")
    parts = [_describe(file, target) for file, target in files.items()]
    body = f"Captured anew: {markdown_code(reason)}\n\n" + "\n\n".join(parts)
    if len(body) > _MOST_CHARACTERS:
        body = body[:_MOST_CHARACTERS] + "\n\n… the rest is in the run's summary.\n"
    return Proposal(f"expectations: {len(files)} captured anew", body, files)


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


# As accelerator.yml names it: "expectations-nvidia-4-1" is the first attempt of nvidia-4.
_ARTIFACT = re.compile(r"(?P<machine>.+)-(?P<attempt>\d+)")


def open_pull_request(
    proposal: Proposal, root: Path, base: str, variables: Mapping[str, str]
) -> None:
    """Commit the files on a branch of their own, push it, and open a pull request to `base`.

    variables: of the workflow run, whose number and attempt no other branch has.
    Raises: UsageError or MachineError if git or GitHub refuses, or outside of a workflow run.
    """
    run, attempt = (run_variable(f"GITHUB_RUN_{name}", variables) for name in ("ID", "ATTEMPT"))
    branch = f"recapture/{run}-{attempt}"
    run_git(root, "checkout", "--quiet", "-b", branch)
    for file, target in proposal.files.items():
        target.write_bytes(file.read_bytes())
    run_git(root, "add", str(SHIPPED))
    who = ("-c", "user.name=assay", "-c", "user.email=assay@users.noreply.github.com")
    run_git(root, *who, "commit", "--quiet", "-m", proposal.title)
    gh("auth", "setup-git")
    run_git(root, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
    gh(
        "pr",
        "create",
        "--base",
        base,
        "--head",
        branch,
        "--title",
        proposal.title,
        "--body",
        proposal.body,
    )


def _describe(file: Path, target: Path) -> str:
    is_new = not target.is_file()
    # A new file is compared with itself: what is no expectation is refused all the same.
    both = [str(file if is_new else target), str(file)]
    command = [sys.executable, "-m", "assay.cli", "expect", "diff", *both, "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        raise UsageError(f"{file.name}: {''.join(done.stderr.strip().splitlines()[-1:])}")
    if is_new:
        return f"### {escape_markdown(file.name)}\n\nNew: nothing was captured on such a machine before."
    return f"### {escape_markdown(file.name)}\n\n{done.stdout.strip()}"
