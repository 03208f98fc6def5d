"""The three files by which a repository is checked: `assay.toml` and two workflows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from assay.ci.configuration import FILE, NAME, Configuration, is_ignored, parse_known_run
from assay.errors import UsageError
from assay.files import read_text
from assay.output.pages import text_environment

ASSAY = "assay-project/assay"

_LABELS = ".github/workflows/assay-labels.yml"
_TEMPLATES = {
    FILE: "assay.toml.j2",
    ".github/workflows/assay.yml": "assay.yml.j2",
    _LABELS: "assay-labels.yml.j2",
}
# How `--machine` is written.
MACHINE_FORM = "NAME=LABEL[,LABEL]@RUN"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Without a model of its own, a repository checks a small one: its device and libraries are tested.
NO_MODEL = "micro:llama"


@dataclass(frozen=True)
class NewMachine:
    """A machine to write into `assay.toml`."""

    name: str
    runs_on: Sequence[str]
    run: str
    start: str = "label"
    pip_index: str = ""


_HOSTED = NewMachine(
    "cpu", ["ubuntu-24.04"], "cpu/bfloat16", "commit", "https://download.pytorch.org/whl/cpu"
)


def read_machine(option: str) -> NewMachine:
    """Read MACHINE_FORM, such as "nvidia=self-hosted,h100@cuda/bfloat16", or NAME=RUN without a runner.

    Raises: UsageError.
    """
    name, equals, rest = option.partition("=")
    labels, at, run = rest.rpartition("@")
    runs_on = labels.split(",") if at else []
    problem = ""
    if not equals:
        problem = "`=` is missing"
    elif not re.fullmatch(NAME, name):
        problem = f"the name {name!r} must consist of small letters, digits and dashes"
    elif any(not label or re.search(r"\s", label) for label in runs_on):
        problem = f"a label in {labels!r} is empty or has a space"
    elif "/" not in run:
        problem = f"{run!r} lacks a dtype" if at else "RUN is missing, such as cpu/bfloat16"
    if problem:
        raise UsageError(f"--machine {option}: {problem}; write {MACHINE_FORM}")
    try:
        parse_known_run(run)
    except UsageError as error:
        raise UsageError(f"--machine {option}: {error}") from None
    return NewMachine(name, runs_on, run)


def find_models(root: Path) -> list[str]:
    """Find the folders of models below `root`: those with a config.json and weights, and that git does not ignore."""
    found = []
    for file in sorted(root.glob("**/config.json")):
        folder = file.parent.relative_to(root)
        is_hidden = any(part.startswith(".") for part in folder.parts)
        if not is_hidden and any(file.parent.glob("*.safetensors")):
            found.append(folder.as_posix())
    return [folder for folder in found if not is_ignored(root, folder)]


def require_label_of_workflow(configuration: Configuration, root: Path) -> None:
    """Raise UsageError if the workflow that removes old labels looks for another `label`."""
    path, prefix = root / _LABELS, f"'{configuration.label}:'"
    if path.is_file() and prefix not in read_text(path):
        raise UsageError(
            f'label = "{configuration.label}", but {_LABELS} removes the labels of another one after a push:'
            f" write {prefix} into its line `if: startsWith(...)`"
        )


def make_files(
    root: Path,
    machines: Sequence[NewMachine],
    branch: str,
    commit: str,
    models: Sequence[str] = (),
    *,
    workflows: bool = True,
) -> dict[Path, str]:
    """Make the texts of the files for the repository in `root`. Returns: each by its path.

    machines: besides the hosted CPU, which checks every commit.
    models: to check; without any, a small one of assay.
    workflows: False for `assay.toml` alone, which other CI systems need. Then no machine is added.
    branch: the default branch; "": that of the remote, else the current one.
    commit: of assay, 40 hexadecimal digits; "": the tag of this version.
    Raises: UsageError if a file exists or a value is wrong.
    """
    wanted = _TEMPLATES if workflows else {FILE: _TEMPLATES[FILE]}
    if existing := [name for name in wanted if (root / name).exists()]:
        raise UsageError(
            f"{root} already has {', '.join(existing)}: edit it if it is assay's, else rename it first"
        )
    if commit and not _COMMIT.fullmatch(commit):
        raise UsageError(f"--commit {commit}: write all 40 digits of a commit of {ASSAY}")
    if workflows:
        if machines and not any(machine.runs_on for machine in machines):
            raise UsageError(
                f"--machine {machines[0].name}={machines[0].run}: name the labels of its runner, as in"
                f" {MACHINE_FORM}, or add --no-workflows"
            )
        listed = [*machines, _HOSTED]
    else:
        listed = [*machines] or [NewMachine("cpu", [], "cpu/bfloat16")]
    names = [machine.name for machine in listed]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--machine: {', '.join(doubled)} is given twice, or is the hosted CPU")
    tag = f"v{version('assay-core')}"
    values = {
        "workflows": workflows,
        "machines": listed,
        "models": models or [NO_MODEL],
        "label": "assay",
        "install": ["--editable", "."] if (root / "pyproject.toml").is_file() else [],
        "branch": branch or default_branch(root),
        "repository": ASSAY,
        "commit": commit or tag,
        "comment": f" # {tag}" if commit else "",
    }
    templates = text_environment(Path(__file__).with_name("templates"))
    return {
        root / name: templates.get_template(template).render(values)
        for name, template in wanted.items()
    }


def default_branch(root: Path) -> str:
    """Read the branch that the remote calls its default, else the current one. A worktree has neither file."""
    for file, prefix in (("refs/remotes/origin/HEAD", "remotes/origin"), ("HEAD", "heads")):
        path, start = root / ".git" / file, f"ref: refs/{prefix}/"
        if path.is_file() and (text := read_text(path).strip()).startswith(start):
            return text.removeprefix(start)
    return "main"
