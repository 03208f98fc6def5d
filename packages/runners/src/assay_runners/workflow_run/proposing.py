"""The pull request of a recapture, made from the captured files."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.errors import UsageError
from assay.foreign_text import escape_markdown, markdown_code
from assay_runners.workflow_run.outputs import run_variable
from assay_runners.workflow_run.programs import run_git, run_program

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
    parts = [_describe(file, target) for file, target in files.items()]
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


def _describe(file: Path, target: Path) -> str:
    is_new = not target.is_file()
    # A new file is compared with itself, which still refuses a file that is not an expectation.
    both = [str(file if is_new else target), str(file)]
    command = [sys.executable, "-m", "assay.cli", "expect", "diff", *both, "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        raise UsageError(f"{file.name}: {''.join(done.stderr.strip().splitlines()[-1:])}")
    text = "New: this is the first capture on such a machine." if is_new else done.stdout.strip()
    return f"### {escape_markdown(file.name)}\n\n{text}"
