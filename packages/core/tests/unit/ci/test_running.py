"""A job runs its commands tier by tier, and no success stands without a verdict."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from assay.ci.configuration import Step
from assay.ci.running import JUNIT_FILE, SUMMARY_FILE, JobResult, run_steps, write_job
from assay.cli.application import app
from assay.errors import MachineError
from assay.report.page.html import INDEX_FILE
from assay.report.run_report import Report
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

LOAD = Step("check", "load", ("check", "load", "m"))
GENERATE = Step("check", "generate", ("check", "generate", "m"))
SMOKE = Step("smoke", "smoke", ("smoke", "run"))
BENCH = Step("bench", "bench", ("bench", "run"))
COMPARE = Step("bench", "bench-compare", ("bench", "compare", "base"), earlier="bench")

Run = Callable[..., JobResult]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs steps whose command exits with a code, after it wrote a verdict."""

    def run_fake(
        steps: Sequence[Step], codes: Mapping[str, int], verdicts: Mapping[str, str] | None = None
    ) -> JobResult:
        @contextmanager
        def start(words: list[str], **_: object) -> Iterator[SimpleNamespace]:
            folder = Path(words[words.index("--output") + 1])
            kind = (verdicts or {}).get(folder.name, "clean")
            if kind != "none":
                faulty = "model.layers.2.mlp" if kind == "faulty" else None
                write_sample(folder / "inner", Sample(num_layers=3, faulty_module=faulty))
            printed = ["loads\n", "assay: it broke\n", "more\n"]
            yield SimpleNamespace(returncode=codes.get(folder.name, 0), stderr=printed)

        (tmp_path / "runs").mkdir()
        monkeypatch.setattr("subprocess.Popen", start)
        return run_steps("box", steps, tmp_path, tmp_path / "runs")

    return run_fake


def test_a_job_passes_if_all_its_commands_do(run: Run, tmp_path: Path) -> None:
    job = run([LOAD, GENERATE, SMOKE], {})
    assert job.exit_code == 0
    assert [result.failure for result in job.results] == ["", "", ""]
    assert job.results[0].words == ("check", "load", "m")


def test_a_pass_says_how_many_parts_are_unchecked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "unchecked", ["updates"])
    summary = write_job(run([LOAD, GENERATE], {}), tmp_path / "runs").splitlines()
    assert summary[0] == "# box: PASS (partly unchecked: updates)"
    assert any(
        line.startswith("| check | load | PASS (partly unchecked: updates) |") for line in summary
    )


def test_a_tier_that_fails_runs_to_its_end_and_stops_the_next(run: Run, tmp_path: Path) -> None:
    job = run([LOAD, GENERATE, SMOKE], {"load": 1}, {"load": "faulty"})
    ended = [(result.step, result.code) for result in job.results]
    assert ended == [(LOAD, 1), (GENERATE, 0), (SMOKE, None)]
    assert job.exit_code == 1
    summary = write_job(job, tmp_path / "runs")
    assert summary == (tmp_path / "runs" / SUMMARY_FILE).read_text(encoding="utf-8")
    lines = summary.splitlines()
    assert lines[0] == "# box: FAIL, 1 command not started"
    assert "| smoke | smoke | not started: an earlier tier does not pass |  |" in lines
    page = (tmp_path / "runs" / INDEX_FILE).read_text(encoding="utf-8")
    assert "<h1>box: FAIL, 1 command not started</h1>" in page
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in page.splitlines() if "<tr>" in row]
    assert [row[:3] for row in cells if len(row) == 4] == [
        ["check", "load", "FAIL, exit code 1"], ["check", "generate", "PASS"],
        ["smoke", "smoke", "not started: an earlier tier does not pass"],
    ]  # fmt: skip
    assert "assay check load m" in lines
    root = ET.parse(tmp_path / "runs" / JUNIT_FILE).getroot()  # noqa: S314 - written above
    problems = [(case.attrib["name"], [one.tag for one in case]) for case in root[0]]
    assert problems == [
        ("check: load", ["failure"]), ("check: generate", []), ("smoke: smoke", ["error"]),
    ]  # fmt: skip
    assert [suite.attrib["name"] for suite in root[1:]] == ["box.load.inner", "box.generate.inner"]


@pytest.mark.parametrize(
    ("code", "verdict", "expected", "failure"),
    [
        (0, "none", 2, "it left no verdict"),
        (0, "faulty", 2, "load/inner says FAIL"),
        (1, "faulty", 1, "FAIL, exit code 1"),
        (3, "clean", 3, "NOT_COMPARED, exit code 3"),
        (2, "none", 2, "it broke"),
        (137, "clean", 2, "it broke"),
    ],
)
def test_the_end_of_a_command_is_judged(
    run: Run, tmp_path: Path, code: int, verdict: str, expected: int, failure: str
) -> None:
    job = run([LOAD], {"load": code}, {"load": verdict})
    write_job(job, tmp_path / "runs")
    assert failure in (tmp_path / "runs" / INDEX_FILE).read_text(encoding="utf-8")
    assert [(result.code, result.failure) for result in job.results] == [(expected, failure)]
    assert job.exit_code == expected


@pytest.mark.parametrize(
    ("codes", "expected"), [((3, 1), 1), ((1, 2), 2), ((3, 0), 3), ((0, 0), 0)]
)
def test_the_worst_code_is_that_of_the_job(run: Run, codes: tuple[int, int], expected: int) -> None:
    job = run([LOAD, GENERATE], dict(zip(("load", "generate"), codes, strict=True)))
    assert job.exit_code == expected


def test_a_command_gets_the_folder_of_an_earlier_one(run: Run, tmp_path: Path) -> None:
    result = run([BENCH, COMPARE], {}).results[1]
    assert result.words[:4] == ("bench", "compare", "base", "runs/bench")  # from the repository


def test_a_job_is_rehearsed_on_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assay.toml").write_text(
        '[machines.box]\nruns-on = ["my-box"]\nrun = "sim:fp8/bfloat16"\n[[load]]\nmodel = "m"'
    )
    started: list[tuple[str, tuple[str, ...]]] = []

    def start(machine: str, steps: Sequence[Step], *_: object) -> JobResult:
        started.extend((machine, step.words) for step in steps)
        raise SystemExit(0)

    monkeypatch.setattr("assay.ci.running.run_steps", start)
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["ci", "run", "box", "--run", "cpu/float16", "--output", "out"])
    assert started == [
        ("box, rehearsed on cpu/float16", ("check", "load", "m", "--run", "cpu/float16"))
    ]


@pytest.mark.parametrize(
    ("entry", "is_refused"),
    [
        ("", True),
        ("candidate-python = 'old/bin/python'", False),
        ("candidate = 'float32'", True),
    ],
)
def test_an_absent_device_is_an_error_before_the_first_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, is_refused: bool
) -> None:
    (tmp_path / "assay.toml").write_text(
        f'[machines.box]\nrun = "cuda/bfloat16"\n[[generate]]\nmodel = "m"\n{entry}'
    )

    def refuse(run: Run) -> None:
        raise MachineError(f"{run}: there is no such device")

    def start(*_: object) -> JobResult:
        raise SystemExit(0)

    monkeypatch.setattr("assay.devices.detection.require_run", refuse)
    monkeypatch.setattr("assay.ci.running.run_steps", start)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["ci", "run", "box", "--output", "out"])
    assert isinstance(done.exception, MachineError) is is_refused
    assert (tmp_path / "out").exists() is not is_refused


def test_a_project_that_only_the_job_installs_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "nowhere-installed"')
    (tmp_path / "assay.toml").write_text(
        'install = ["-e", "."]\n[machines.box]\nrun = "cpu/float32"\n[[load]]\nmodel = "m"'
    )
    monkeypatch.setattr(
        "assay.ci.running.run_steps", lambda *_: (_ for _ in ()).throw(SystemExit(0))
    )
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["ci", "run", "box", "--output", "out"])
    assert done.stderr == (
        "assay: this Python lacks nowhere-installed, which the job installs (`install` in assay.toml)."
        " Run: assay ci install box\n"
    )


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("SLURM_STEP_NUM_TASKS", 2, "srun starts assay ci run in 4 tasks"),
        ("SLURM_NTASKS", 0, "SLURM_NTASKS is 4; it starts the ranks of its checks itself"),
    ],
)
def test_several_tasks_of_slurm_are_refused_and_an_allocation_of_several_noted(
    name: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assay.toml").write_text(
        '[machines.box]\nrun = "cpu/float32"\n[[load]]\nmodel = "m"'
    )
    monkeypatch.setattr(
        "assay.ci.running.run_steps", lambda *_: (_ for _ in ()).throw(SystemExit(0))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "4")
    done = CliRunner().invoke(app, ["ci", "run", "box", "--output", "out"])
    assert words in f"{done.stderr}{done.exception}"
    assert (done.exit_code == 0) == (code == 0)
