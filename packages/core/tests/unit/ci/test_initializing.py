"""The files that `assay init` writes, and what they mean to the planner."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from assay.ci.configuration import list_steps, read_configuration
from assay.ci.initializing import (
    find_models,
    make_files,
    read_machine,
    require_label_of_workflow,
)
from assay.ci.planning import plan_label
from assay.cli.ci import init
from assay.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose only branch is `trunk`."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/trunk\n", encoding="utf-8")
    return tmp_path


def write(root: Path, *machines: str, commit: str = "", workflows: bool = True) -> dict[str, str]:
    read = [read_machine(one) for one in machines]
    files = make_files(root, read, "", commit, find_models(root), workflows=workflows)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return {path.name: text for path, text in files.items()}


def test_the_written_configuration_starts_each_machine(root: Path) -> None:
    write(root, "box=self-hosted,my-box@sim:fp8/bfloat16")
    configuration = read_configuration(root)
    (job,) = plan_label(configuration, "assay:box").jobs
    assert (job.target, job.runs_on) == ("box", ("self-hosted", "my-box"))
    (step,) = list_steps(configuration, "box")
    assert step.words == (
        "check", "generate", "micro:llama", "--candidate", "sim:fp8/bfloat16", "--reference",
        "cpu/float32",
    )  # fmt: skip
    hosted = configuration.find("cpu")
    assert (hosted.start, hosted.pip_index) == ("commit", "https://download.pytorch.org/whl/cpu")
    assert configuration.find("box").pip_index == ""


def test_a_machine_without_github_needs_no_runner(root: Path) -> None:
    with pytest.raises(UsageError, match="name the labels of its runner, as in NAME=LABEL"):
        write(root, "box=sim:fp8/bfloat16")
    files = write(root, "box=sim:fp8/bfloat16", workflows=False)
    assert set(files) == {"assay.toml"}
    assert not re.search("label|GitHub|assay:", files["assay.toml"])
    configuration = read_configuration(root)
    assert set(configuration.machines) == {"box"}
    (step,) = list_steps(configuration, "box")
    assert "sim:fp8/bfloat16" in step.words
    plan = plan_label(configuration, "assay:box")
    assert [step.tier for step in plan.steps(configuration)] == ["check"]
    assert plan.jobs == ()
    assert plan.refused.endswith("on that machine: assay ci run box")  # GitHub has none


def test_without_workflows_no_label_starts_a_machine(root: Path) -> None:
    text = write(root, "box=my-box@sim:fp8/bfloat16", workflows=False)["assay.toml"]
    assert "[machines.box] # started by: assay ci run box\n" in text
    assert "started by the label" not in text
    assert read_configuration(root).find("box").runs_on == ("my-box",)


def test_a_machine_without_a_runner_stands_next_to_one_with_a_runner(root: Path) -> None:
    write(root, "box=my-box@sim:fp8/bfloat16", "slurm=cuda/bfloat16")

    machines = read_configuration(root).machines
    assert {name: bool(machine.runs_on) for name, machine in machines.items()} == {
        "box": True, "slurm": False, "cpu": True,
    }  # fmt: skip


def test_a_label_that_is_gone_is_no_error(root: Path) -> None:
    script = write(root)["assay-labels.yml"]
    (body,) = re.findall(r"        run: \|\n((?:          .*\n)+)", script)
    fake = root / "gh"
    fake.write_text('#!/bin/sh\n[ "$2" != --method ] && echo "$LEFT"\n', encoding="utf-8")
    fake.chmod(0o755)
    (root / "jq").write_text("#!/bin/sh\necho assay%3Abox\n", encoding="utf-8")
    (root / "jq").chmod(0o755)
    for left, code in (("other", 0), ("assay:box", 1)):
        variables = {"PATH": f"{root}:{os.environ['PATH']}", "LABEL": "assay:box", "LEFT": left}
        done = subprocess.run(["bash", "-e", "-c", body], env=variables, check=False)
        assert (done.returncode != 0) == bool(code)


def test_models_and_the_package_of_the_repository_are_found(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("/out\n", encoding="utf-8")
    for name in ("models/a", "models/b", ".cache/c", "docs", "out/step-2"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").touch()
    for name in ("models/a", "models/b", ".cache/c", "out/step-2"):
        (root / name / "model.safetensors").touch()
    (root / "pyproject.toml").touch()
    assert find_models(root) == ["models/a", "models/b"]
    write(root)
    configuration = read_configuration(root)
    assert [entry["model"] for entry in configuration.generate] == ["models/a", "models/b"]
    assert configuration.install == ("--editable", ".")


def test_every_commented_example_is_valid(root: Path) -> None:
    text = write(root)["assay.toml"]
    commented = re.sub(r"(?m)^# (?=\[\[|[a-z-]+ = )", "", text)
    (root / "assay.toml").write_text(commented, encoding="utf-8")
    assert set(tomllib.loads(commented)) >= {"train", "smoke", "data", "expectations", "bench"}
    steps = list_steps(read_configuration(root), "cpu")
    names = [step.name for step in steps]
    assert names == ["generate", "train-1", "train-2", "smoke", "data", "expectations"]
    # In bfloat16, rounding hides small updates: the second entry is the same in float32.
    first, second = (step.words for step in steps[1:3])
    assert second == tuple("cpu/float32" if word == "cpu/bfloat16" else word for word in first)


def test_every_commented_example_is_explained_by_a_sentence(root: Path) -> None:
    lines = write(root)["assay.toml"].splitlines()
    for number, line in enumerate(lines):
        if line.startswith("# [["):
            assert re.fullmatch(r"# [^\[=]+\.", lines[number - 1]), line
    assert not any(re.fullmatch(r'# [a-z-]+ = ""', line) for line in lines)


def test_init_ends_with_one_next_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(machine=["a=x@cpu/bfloat16", "b=y@cpu/bfloat16"], yes=True, root=root)
    assert capsys.readouterr().out.splitlines() == [
        "Add runs/ to .gitignore, and commit the files.",
        "Create the labels on GitHub: gh label create assay:a; gh label create assay:b",
        "Next: edit assay.toml, then run assay ci plan assay:a",
    ]


def test_workflows_name_the_branch_and_the_release_or_a_commit(root: Path) -> None:
    called = "assay-project/assay/.github/workflows/repository.yml"
    workflow = write(root)["assay.yml"]
    assert 'branches: ["trunk"]' in workflow
    assert f"uses: {called}@v{version('assay-core')}\n" in workflow
    for path in root.rglob("assay*.*"):
        path.unlink()
    pinned = write(root, commit=COMMIT)["assay.yml"]
    assert f"uses: {called}@{COMMIT} # v{version('assay-core')}\n" in pinned


def test_the_default_branch_of_the_remote_is_preferred(root: Path) -> None:
    file = root / ".git/refs/remotes/origin/HEAD"
    file.parent.mkdir(parents=True)
    file.write_text("ref: refs/remotes/origin/release/2\n", encoding="utf-8")
    assert 'branches: ["release/2"]' in write(root)["assay.yml"]


def test_a_worktree_of_git_is_a_repository(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: elsewhere\n", encoding="utf-8")
    assert 'branches: ["main"]' in write(tmp_path)["assay.yml"]


def test_each_workflow_has_at_most_40_lines(root: Path) -> None:
    files = write(root, "a=b@cpu/float32")
    workflows = {name: text for name, text in files.items() if name.endswith(".yml")}
    assert {name for name, text in workflows.items() if len(text.splitlines()) > 40} == set()
    assert len(files) == 3


@pytest.mark.parametrize("name", ["assay.toml", ".github/workflows/assay.yml"])
def test_an_existing_file_is_never_replaced(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
    with pytest.raises(UsageError, match=f"already has {re.escape(name)}: edit .* rename"):
        make_files(root, [], "", "")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("box", r"--machine box: `=` is missing; write NAME=LABEL\[,LABEL\]@RUN"),
        ("Box=a@cpu/float32", "the name 'Box' must consist of small letters, digits and dashes"),
        ("my box=a@cpu/float32", "the name 'my box' must consist of"),
        ("box=a b@cpu/float32", "a label in 'a b' is empty or has a space"),
        ("box=a,@cpu/float32", "a label in 'a,' is empty or has a space"),
        ("box=@cpu/float32", "a label in '' is empty or has a space"),
        ("box=a", "--machine box=a: RUN is missing, such as cpu/bfloat16; write"),
        ("box=a@cpu", "'cpu' lacks a dtype; write"),
        ("box=a@cpu/float 32", "--machine box=a@cpu/float 32: unknown dtype 'float 32'"),
        ("box=a@cpu/int4", "int4"),
    ],
)
def test_a_wrong_machine_is_refused(option: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_machine(option)


@pytest.mark.parametrize(
    ("machines", "commit", "message"),
    [
        (["a=b@cpu/float32", "a=c@cpu/float32"], "", "a is given twice"),
        (["cpu=b@cpu/float32"], "", "cpu is given twice, or is the hosted CPU"),
        ([], "0123", "write all 40 digits"),
    ],
)
def test_wrong_values_write_nothing(
    root: Path, machines: list[str], commit: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        write(root, *machines, commit=commit)
    assert [path.name for path in root.iterdir()] == [".git"]


def test_a_label_that_no_workflow_removes_is_refused(root: Path) -> None:
    write(root)
    configuration = read_configuration(root)
    require_label_of_workflow(configuration, root)
    other = configuration.model_copy(update={"label": "gpu"})
    with pytest.raises(UsageError, match="write 'gpu:' into its line"):
        require_label_of_workflow(other, root)
