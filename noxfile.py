"""What can be run on assay; `nox --list` shows it. Sessions only compose: the work is elsewhere."""

import sys
from pathlib import Path

import nox

# nox runs this file by its path, which does not make its folder importable.
sys.path.insert(0, str(Path(__file__).parent))

from environments import shared
from environments.release import release_packages
from environments.shared import tools_environment, torch_environment

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "unit", "subsystem", "runners", "repo"]
nox.options.default_venv_backend = "none"  # sessions share those of environments/shared.py

_AT_A_TIME = ("-n", "2", "--dist", "loadfile")  # the tests of a file share its fixtures


@nox.session(tags=["static"])
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    tools_environment(session).run(session, "ruff", "check")
    tools_environment(session).run(session, "ruff", "format", "--check")


@nox.session(tags=["static"])
def types(session: nox.Session) -> None:
    """Check the types of all packages, tests and tools."""
    torch_environment(session).run(session, "mypy", *session.posargs)


@nox.session(tags=["tests"])
def unit(session: nox.Session) -> None:
    """Test each part of the packages on its own, without an accelerator. `-- -k NAME`."""
    _run_tests(session, "not long", *_unit_folders())


@nox.session(tags=["tests"])
def subsystem(session: nox.Session) -> None:
    """Test parts together: whole commands, processes and reports on micro models."""
    _run_tests(session, "not long", *_files("packages/*/tests/subsystem"))


@nox.session(name="subsystem-long", default=False, tags=["long"])
def subsystem_long(session: nox.Session) -> None:
    """Repeat whole commands for further models, trainers, meshes, libraries and faults."""
    _run_tests(session, "long", *_files("packages/*/tests/subsystem"), *_unit_folders())


def _run_tests(session: nox.Session, marks: str, *folders: str) -> None:
    words = ["--durations=15", "-m", marks, *folders, *session.posargs]
    torch_environment(session).run(session, "pytest", *_AT_A_TIME, *words)


def _unit_folders() -> list[str]:  # those of runners are in the session `runners`, without torch
    return [folder for folder in _files("packages/*/tests/unit") if "runners" not in folder]


@nox.session(tags=["static"])
def runners(session: nox.Session) -> None:
    """Check the runner layer: workflows by GitHub's own parser, their security, rendered files."""
    tools = tools_environment(session)
    tools.run_program(session, "zizmor", "--offline", "--persona=pedantic", ".github", "examples")
    for schema, pattern in (
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-actions", ".github/actions/*/*.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
    ):
        tools.run(session, "check_jsonschema", "--builtin-schema", schema, *_files(pattern))
    tools.run_program(session, "shellcheck", *_files("runners/**/*.sh"))
    tools.run(session, "assay.cli", "runners", "check")
    folders = ["packages/runners/tests/unit", "packages/runners/tests/workflows"]
    # The first test of the workflows waits for the download of GitHub's packages.
    tools.run(session, "pytest", *_AT_A_TIME, *folders, "--timeout=660", *session.posargs)


@nox.session(tags=["static"])
def repo(session: nox.Session) -> None:
    """Check the repository itself: import layers, workflows, README commands, links, changes."""
    tools = tools_environment(session)
    tools.run(session, "towncrier", "build", "--draft", "--version", "next")
    tools.run(session, "pytest", *_AT_A_TIME, "tests/repo", *session.posargs)


@nox.session(default=False, tags=["static"])
def docs(session: nox.Session) -> None:
    """Build the documentation site into .nox/site. A broken link or anchor is an error."""
    words = ["-W", "--keep-going", "--quiet", "-c", "docs/site", ".", ".nox/site"]
    torch_environment(session).run(session, "sphinx", *words, *session.posargs)


@nox.session(default=False, tags=["device"])
def check(session: nox.Session) -> None:
    """Check a model on the best device here, then show how a planted fault is found."""
    torch_environment(session, "core").run(session, "assay.cli", "selftest", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the published packages into dist, then check a model with the wheels alone. `-- 3.11 3.14`."""
    release_packages(session)


@nox.session(default=False, tags=["long"])
def faults(session: nox.Session) -> None:
    """Plant every known fault and print which are found, and where. `-- --corpus published`."""
    _run_corpus(session, "faults")


@nox.session(name="false-alarms", default=False, tags=["long"])
def false_alarms(session: nox.Session) -> None:
    """Run correct variants that differ in their numbers: none may fail. `-- --corpus training`."""
    _run_corpus(session, "false_alarms")


@nox.session(default=False, tags=["long"])
def perf(session: nox.Session) -> None:
    """Measure the cost of recording, metrics, checks and comparisons, as ratios."""
    torch_environment(session).install(session, "--no-deps", *shared.TIMED_TOOLS)
    _run_corpus(session, "perf")


def _run_corpus(session: nox.Session, folder: str) -> None:
    # People run these sessions for their tables, so pytest captures no output. One test runs a whole
    # corpus, which may take an hour. Each process in it has its own time limit.
    words = [f"packages/core/tests/{folder}", "--capture=no", "--timeout=14400"]
    torch_environment(session).run(session, "pytest", *words, *session.posargs)


@nox.session(default=False)
def locked(session: nox.Session) -> None:
    """Hold all numbers to those of an earlier commit. `-- FOLDER --record`, then `-- FOLDER`."""
    torch_environment(session).run(session, "packages.core.tests.locked", *session.posargs)


@nox.session(default=False, tags=["long"])
def fuzz(session: nox.Session) -> None:
    """Mutate the files of every reader, and give commands hostile ones. `-- --seconds 60 --seed 1`."""
    torch_environment(session).run(session, "packages.core.tests.fuzz", *session.posargs)


@nox.session(default=False, tags=["device"])
def smoke(session: nox.Session) -> None:
    """Train through set-up, checkpoint, resume, tear-down in every feature. `-- --coverage one`."""
    environment = torch_environment(session)
    words = ["smoke", "run"]
    if not shared.is_given(session, "--device") and (run := shared.best_run(session, environment)):
        words += ["--device", run[1].partition("/")[0]]
    if not session.posargs or session.posargs[0] == "-k":
        # Libraries with a command line of their own, beside the plan.
        for file in _files("examples/*/smoke*.toml"):
            words += ["--with", f"command:{file}"]
    environment.run(session, "assay.cli", *words, *session.posargs)


@nox.session(name="smoke-faults", default=False, tags=["long"])
def smoke_faults(session: nox.Session) -> None:
    """Plant every known fault of a training cycle: each has to fail by its name."""
    words = ["packages/smoke/tests/faults", "--timeout=300", *session.posargs]
    torch_environment(session).run(session, "pytest", *words)


@nox.session(default=False, tags=["device"])
def expectations(session: nox.Session) -> None:
    """Verify the captured expectations of the best device here."""
    environment = torch_environment(session)
    words = ["expect", "verify", *shared.best_run(session, environment), *session.posargs]
    environment.run(session, "assay.cli", *words, success_codes=shared.successes())


@nox.session(default=False, tags=["device"])
def suites(session: nox.Session) -> None:
    """Hold models and decoders to what is expected of them, with pytest. `-- -k decoders`."""
    environment = torch_environment(session)
    run = shared.best_run(session, environment, "--assay-device")
    words = ["--pyargs", "assay_expectations.suites", "--timeout=600", *run, *session.posargs]
    environment.run(session, "pytest", *words)


@nox.session(default=False, tags=["device"])
def bench(session: nox.Session) -> None:
    """Tune a micro model in two ways, and hold what it is worth to the shipped baselines."""
    environment = torch_environment(session)
    words = list(session.posargs) or ["selftest"]
    codes = [0] if session.posargs else shared.successes()
    if words[0] == "run":
        words += shared.best_run(session, environment)
    environment.run(session, "assay.cli", "bench", *words, success_codes=codes)


@nox.session(name="bench-rates", default=False, tags=["long"])
def bench_rates(session: nox.Session) -> None:
    """Measure the error rates of comparisons of models."""
    words = ["pytest", "packages/bench/tests/rates", "--capture=no", *session.posargs]
    torch_environment(session).run(session, *words)


@nox.session(default=False, tags=["fleet"])
def plan(session: nox.Session) -> None:
    """Say what a label or an event of GitHub starts. `-- smoke:nvidia --explain`."""
    tools_environment(session).run(session, "assay.cli", "runners", "plan", *session.posargs)


@nox.session(default=False, tags=["fleet"])
def rehearse(session: nox.Session) -> None:
    """Run here, in a clean clone, what a label or an event would start. `-- smoke:nvidia`."""
    words = ["runners", "rehearse", "--nox", sys.executable, *session.posargs]
    tools_environment(session).run(session, "assay.cli", *words)


@nox.session(name="machine-job", default=False, tags=["fleet"])
def machine_job(session: nox.Session) -> None:
    """Run a planned job on this machine: the sessions that ASSAY_JOB names, and its summary."""
    words = ["runners", "run", "--nox", sys.executable, *session.posargs]
    # The sessions need this environment anyway, and making another one takes a minute of every job.
    torch_environment(session).run(session, "assay.cli", *words)


@nox.session(default=False, tags=["fleet"])
def recapture(session: nox.Session) -> None:
    """Capture what models give on the best device here, into runs/captured. `-- MODEL... --reason`."""
    environment = torch_environment(session)
    words = [*shared.best_run(session, environment), "--output", "runs/captured"]
    environment.run(session, "assay.cli", "expect", "capture", *words, *session.posargs)


@nox.session(default=False, tags=["fleet"])
def propose(session: nox.Session) -> None:
    """Open the pull request of a recapture. `-- FOLDER`."""
    torch_environment(session).run(session, "assay.cli", "runners", "propose", *session.posargs)


@nox.session(name="report-nightly", default=False, tags=["fleet"])
def report_nightly(session: nox.Session) -> None:
    """Keep the issues that say how the nightly run stands, and whether the machines need a newer runner."""
    tools = tools_environment(session)
    tools.run(session, "assay.cli", "runners", "report-nightly", *session.posargs)


@nox.session(default=False, tags=["fleet"])
def reap(session: nox.Session) -> None:
    """End the cloud instances that outlived their lifetime."""
    tools_environment(session).run(session, "assay.cli", "runners", "reap", *session.posargs)


def _files(pattern: str) -> list[str]:
    return [str(path) for path in sorted(Path().glob(pattern))]
