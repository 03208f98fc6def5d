"""What the entries of assay.toml become."""

import re
import subprocess
from pathlib import Path

import pytest

from assay.ci.configuration import (
    Configuration,
    Step,
    describe_models,
    find_missing,
    list_distributions,
    list_steps,
    list_uninstalled,
    read_configuration,
    require_installable,
)
from assay.errors import UsageError

MACHINE = '[machines.box]\nruns-on = ["my-box"]\nrun = "sim:fp8/bfloat16"\n'


def read(folder: Path, text: str) -> Configuration:
    (folder / "assay.toml").write_text(text, encoding="utf-8")
    return read_configuration(folder)


def words_of(folder: Path, entry: str, tier: str = "") -> list[str]:
    return [" ".join(step.words) for step in list_steps(read(folder, MACHINE + entry), "box", tier)]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("[[load]]\nmodel = 'm'", "check load m --run sim:fp8/bfloat16"),
        (
            "[[generate]]\nmodel = 'm'\nlevel = 'logits'",
            "check generate m --level logits --candidate sim:fp8/bfloat16 --reference cpu/float32",
        ),
        (
            "[[generate]]\nmodel = 'm'\ngolden = 'g'",
            "check generate m --golden g --candidate sim:fp8/bfloat16",
        ),
        (
            "[[train]]\nmodel = 'm'\nlora = true\nsteps = 2\ncandidate = 'float16'",
            "check train m --lora --steps 2 --candidate sim:fp8/float16 --reference cpu/float32",
        ),
        (
            "[[smoke]]\ncase = ['command:a.toml', 'b']\nk = 'lora'",
            "smoke run command:a.toml b -k lora --device sim:fp8",
        ),
        ("[[data]]\ncollator = 'c.py:C'", "smoke data --collator c.py:C"),
        (
            "[[data]]\nfeatures = ['a', 'b']",
            "smoke data --features a --features b",
        ),
        ("[[expectations]]\nfolder = 'e'", "expect verify e --run sim:fp8/bfloat16"),
        ("[[smoke]]\nrun = 'float32'", "smoke run --run sim:fp8/float32"),
    ],
)
def test_an_entry_becomes_a_command_for_the_machine(tmp_path: Path, entry: str, words: str) -> None:
    assert words_of(tmp_path, entry) == [words]


def test_a_bench_with_a_baseline_is_also_compared(tmp_path: Path) -> None:
    entry = "[[bench]]\nmodel = 'm'\nbaseline = 'b'"
    assert words_of(tmp_path, entry) == []  # not among a machine's tiers by default
    run, compare = list_steps(read(tmp_path, MACHINE + entry), "box", "bench")
    assert run.command == "assay bench run --model m --run sim:fp8/bfloat16"
    assert compare.command == "assay bench compare b DIR/bench"  # of the run before
    assert compare.words_in(tmp_path)[-1] == f"{tmp_path}/bench"


def test_a_job_runs_its_tiers_in_their_order(tmp_path: Path) -> None:
    text = "[[expectations]]\nfolder = 'e'\n[[smoke]]\ncase = 's'\n[[load]]\nmodel = 'm'\n[[load]]\nmodel = 'n'"
    steps = list_steps(read(tmp_path, MACHINE + text), "box")
    named = [(step.tier, step.name) for step in steps]
    assert named == [
        ("check", "load-m"), ("check", "load-n"), ("smoke", "smoke"), ("expectations", "expectations"),
    ]  # fmt: skip
    assert list_distributions(steps) == ["assay-core", "assay-smoke", "assay-expectations"]
    assert list_distributions(steps[:2]) == ["assay-core"]


def test_a_machine_has_its_own_tiers_and_number_of_cards(tmp_path: Path) -> None:
    text = (
        MACHINE + "tiers = ['smoke']\ncards = 4\n[[load]]\nmodel = 'm'\n[[smoke]]\ncoverage = 'one'"
    )
    assert list_steps(read(tmp_path, text), "box") == (
        Step(
            "smoke", "smoke",
            ("smoke", "run", "--coverage", "one", "--device", "sim:fp8", "--cards", "4"), "smoke",
        ),
    )  # fmt: skip


def test_another_run_replaces_that_of_one_machine(tmp_path: Path) -> None:
    text = "[[load]]\nmodel = 'm'\n[[load]]\nmodel = 'n'\nrun = 'float32'"
    configuration = read(tmp_path, MACHINE + text).with_run("box", "cpu/float16")
    assert [step.words for step in list_steps(configuration, "box")] == [
        ("check", "load", "m", "--run", "cpu/float16"),
        ("check", "load", "n", "--run", "cpu/float32"),  # the dtype is the entry's own
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("[[smoke]]\ndevice = 'cpu'", "smoke: leave 'device' out: the machine decides it"),
        (
            "[[train]]\nmodel = 'm'\ncandidate = 'cpu/float32'",
            "train: candidate = 'cpu/float32': the machine decides the device; write 'float32'",
        ),
        ("[[smoke]]\nrun = 'cpu/bfloat16'", "smoke: run = 'cpu/bfloat16': the machine decides"),
        (
            "[[load]]\nmodel = 'm'\nrun = 'cpu'",
            "load: run = 'cpu': the machine decides the device; write a dtype: float64, float32",
        ),
        ("[[load]]\nmodel = 'm'\nrun = ['float32']", r"load: run = \['float32'\]: the machine"),
    ],
)
def test_an_entry_cannot_judge_another_device_than_its_machine(
    tmp_path: Path, entry: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        words_of(tmp_path, entry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "label = 'a b'\n" + MACHINE,
            "label: it must consist of small letters, digits and dashes",
        ),
        ("machines = {}", "machines"),
        (
            "[machines.box]\nstart = 'commit'\nrun = 'cpu/float32'",
            'machines.box: start = "commit" needs runs-on',
        ),
        (
            "[machines.box]\nruns-on = ['ubuntu-24.04', 'my-mi300']\nstart = 'commit'\nrun = 'cpu/float32'",
            "machines.box: start = \"commit\" would run unreviewed code on your own runner 'my-mi300'",
        ),
        (
            "[machines.box]\nrun = 'cpu/float32'\ntiers = []",
            "tiers: it needs at least 1 item, and has 0",
        ),
        ("[machines.box]\nruns-on = ['a']\nrun = 'cpu'", "machines.box.run"),
        ("[machines.box]\nruns-on = ['a']\nrun = 'spu/float32'", "unknown device 'spu'"),
        (
            "[machines.box]\nruns-on = ['a']\nrun = 'rocm/float32'",
            "write cuda, the name in torch for devices of amd",
        ),
        (
            "[machines.box]\nruns-on = ['a']\nrun = 'hip:1/float32'",
            "unknown device 'hip'; write cuda",
        ),
        (
            "[machines.Box]\nruns-on = ['a']\nrun = 'cpu/float32'",
            "machines: the name 'Box': it must consist of small letters",
        ),
        (MACHINE + "minutes = 361", "minutes"),
        (MACHINE + "tiers = ['check', 'smok']", "machines.box.tiers: 'smok': it must be 'check', "),
        ("[machines.box]\nruns-on = 'a'\nrun = 'cpu/float32'", "box.runs-on: it must be a list"),
        (MACHINE + "minutes = '60'", "machines.box.minutes: it must be a whole number"),
        (MACHINE + "runs_on = ['a']", "machines.box: unknown key 'runs_on'; did you mean runs-on?"),
        (MACHINE + "cards = 'two'", "machines.box.cards: it must be a whole number"),
        (
            MACHINE + "[[load]]\nmodel = 'm'\n[[load]]\nmodel = {x = 1}",
            "load, entry 2: model: it must be a text, a number, true, or a list of texts",
        ),
        (
            MACHINE + "[[smokes]]\ncase = 'm'",
            "assay.toml: unknown table 'smokes'; did you mean smoke?",
        ),
        (
            "colour = 1\n" + MACHINE,
            "assay.toml: unknown key 'colour'; known: label, install, machines, load,",
        ),
        (MACHINE + "minute = 5", "machines.box: unknown key 'minute'; did you mean minutes?"),
        (MACHINE + "run-on = ['a']", "machines.box: unknown key 'run-on'; did you mean runs-on?"),
        (MACHINE + "x = ", "assay.toml"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("output = 'x'", "assay.toml: load, entry 2: a job chooses 'output' itself"),
        ("x = false", "leave 'x' out instead of setting it to false"),
    ],
)
def test_an_entry_that_no_command_can_have_is_refused(
    tmp_path: Path, entry: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        words_of(tmp_path, f"[[load]]\nmodel = 'm'\n[[load]]\nmodel = 'n'\n{entry}")


def test_files_of_the_repository_that_do_not_exist_are_found(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "cpu").mkdir()  # a folder with the name of a device
    (tmp_path / "a.toml").touch()
    (tmp_path / "a.py").write_text("def install(): ...\n", encoding="utf-8")
    text = """
[[load]]
model = "models/tiny"
[[load]]
model = "models/tyny"
[[load]]
model = "organization/model"
[[generate]]
model = "micro:llama"
candidate-setup = "a.py:install"
golden = "goldens/tiny"
[[smoke]]
case = ["command:a.toml", "command:b.toml"]
[[data]]
collator = "b.py:pad"
"""
    steps = list_steps(read(tmp_path, MACHINE + text), "box")
    assert find_missing(steps, tmp_path) == [
        "load, entry 2: models/tyny; did you mean tiny?", "generate: goldens/tiny", "smoke: b.toml", "data: b.py",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("install", "message"),
    [
        (["--editable", "."], ". has no pyproject.toml or setup.py"),
        (["--editable=."], ". has no pyproject.toml or setup.py"),
        (["--editable"], "--editable needs a value"),
        (["./library[train]"], "./library does not exist"),
        (["-r", "needs.txt"], "needs.txt does not exist"),
        (["torchdata", "./whole[train]", "-r", "there.txt", "--no-deps"], ""),
    ],
)
def test_an_absent_package_of_the_repository_is_found(
    tmp_path: Path, install: list[str], message: str
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/pyproject.toml").touch()
    (tmp_path / "there.txt").touch()
    configuration = read(tmp_path, f"install = {install}\n{MACHINE}")
    if message:
        with pytest.raises(UsageError, match=re.escape(f"assay.toml: install: {message}")):
            require_installable(configuration, tmp_path)
    else:
        require_installable(configuration, tmp_path)


def test_a_project_that_this_python_lacks_is_named(tmp_path: Path) -> None:
    for folder, name in (("a", "of-nobody"), ("b", "pytest")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    configuration = read(tmp_path, f"install = ['--editable', 'a', 'b']\n{MACHINE}")
    assert list_uninstalled(configuration, tmp_path) == ["of-nobody"]


def test_models_that_a_clone_does_not_hold_are_named(tmp_path: Path) -> None:
    text = """
[[generate]]
model = "models/tiny"
golden = "goldens/tiny"
[[generate]]
model = "out/step-2"
[[load]]
model = "micro:llama"
[[data]]
model = "org/name"
"""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("out/\n", encoding="utf-8")
    (tmp_path / "out/step-2").mkdir(parents=True)
    steps = list_steps(read(tmp_path, MACHINE + text), "box")
    hub = "the repository has no folder {}: a job would load that name from the hub"
    assert describe_models(steps, tmp_path) == [
        f"generate, entry 1: {hub.format('models/tiny')}",
        "generate, entry 2: git ignores out/step-2: a job would not have it",
        f"data: {hub.format('org/name')}",
    ]
    (tmp_path / "a.toml").write_text('model = "models/small"\n', encoding="utf-8")
    steps = list_steps(read(tmp_path, MACHINE + "[[smoke]]\ncase = 'command:a.toml'"), "box")
    assert describe_models(steps, tmp_path) == [f"smoke: {hub.format('models/small')}"]
    (tmp_path / "models/tiny").mkdir(parents=True)
    steps = list_steps(read(tmp_path, MACHINE + text), "box")
    assert not [one for one in describe_models(steps, tmp_path) if "tiny" in one]


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def pad(tokenizer): ...", []),
        ("async def pad(): ...", []),
        ("class pad: ...", []),
        ("pad = print", []),
        ("pad: int = 1", []),
        ("first, pad = 1, 2", []),
        ("if True:\n    def pad(): ...", []),
        ("from elsewhere import padding as pad", []),
        ("import pad.more", []),
        ("from elsewhere import *", []),
        ("globals()['pad'] = 1", []),
        ("def __getattr__(name): ...", []),
        ("def pad(", []),  # running it shows the error
        ("def pads(): ...", ["data: c.py: unknown name 'pad'; did you mean pads?"]),
        ("def make():\n    def pad(): ...", ["data: c.py: unknown name 'pad'; known: make"]),
        ("class Make:\n    def pad(): ...", ["data: c.py: unknown name 'pad'; known: Make"]),
        ("import more.pad", ["data: c.py: unknown name 'pad'; known: more"]),
    ],
)
def test_a_name_that_the_file_does_not_define_is_missing(
    tmp_path: Path, source: str, missing: list[str]
) -> None:
    (tmp_path / "c.py").write_text(source, encoding="utf-8")
    steps = list_steps(read(tmp_path, MACHINE + "[[data]]\ncollator = 'c.py:pad'"), "box")
    assert find_missing([*steps, *steps], tmp_path) == missing


def test_an_unknown_machine_and_tier_are_refused_with_the_nearest(tmp_path: Path) -> None:
    configuration = read(tmp_path, MACHINE)
    with pytest.raises(UsageError, match="unknown machine 'bax'; did you mean box"):
        list_steps(configuration, "bax")
    with pytest.raises(
        UsageError, match="unknown tier 'zzz'; known: check, smoke, expectations, bench"
    ):
        list_steps(configuration, "box", "zzz")


def test_a_repository_without_the_file_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`assay init` writes one"):
        read_configuration(tmp_path)
