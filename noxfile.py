"""What can be run on assay; `nox --list` shows it. Sessions only compose: the work is elsewhere."""

import itertools
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import nox

# nox runs this file by its path, which does not make its folder importable.
sys.path.insert(0, str(Path(__file__).parent))

from environments.release import release_packages
from environments.shared import (
    PACKAGES,
    ROOT,
    Environment,
    tools_environment,
    torch_environment,
)

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "types", "unit", "subsystem", "runners", "repo"]
# Sessions share the environments of environments/shared.py.
nox.options.default_venv_backend = "none"


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    tools = tools_environment(session)
    tools.run(session, "ruff", "check")
    tools.run(session, "ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages, tests and tools."""
    torch_environment(session).run(session, "mypy", *session.posargs)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def unit(session: nox.Session, package: str) -> None:
    """Test each room of a package on its own, without an accelerator."""
    at_a_time = ("-n", "2", "--dist", "loadfile")
    environment = tools_environment if package in _WITHOUT_TORCH else torch_environment
    environment(session).run(
        session, "pytest", *at_a_time, f"packages/{package}/tests/unit", *session.posargs
    )


# Packages that plan and check: what they import is in the environment of the tools.
_WITHOUT_TORCH = ("runners",)


@nox.session
def subsystem(session: nox.Session) -> None:
    """Test rooms together: whole commands, processes and reports on micro models."""
    _run_subsystem_tests(session, "not long")


@nox.session(name="subsystem-long", default=False)
def subsystem_long(session: nox.Session) -> None:
    """Repeat whole commands for further models, trainers, meshes, libraries and faults."""
    _run_subsystem_tests(session, "long")


def _run_subsystem_tests(session: nox.Session, marks: str) -> None:
    folders = [str(path) for path in sorted(Path("packages").glob("*/tests/subsystem"))]
    # Most tests wait for a process of their own: two at a time take half as long. Three take as long
    # as two on two cores, and some then run into their limits.
    at_a_time = ("-n", "2", "--dist", "loadfile", "--durations=15")
    words = ["-m", marks, *folders, *session.posargs]
    torch_environment(session).run(session, "pytest", *at_a_time, *words)


@nox.session
def runners(session: nox.Session) -> None:
    """Check the runner layer: workflows by GitHub's own parser, their security, rendered files."""
    tools = tools_environment(session)
    yaml = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    actions = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(".github/actions/*/*.yml"))]
    scripts = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("runners/**/*.sh"))]
    tools.run_program(
        session, "zizmor", "--offline", "--persona", "pedantic", ".github", "examples"
    )
    tools.run(session, "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *yaml)
    tools.run(session, "check_jsonschema", "--builtin-schema", "vendor.github-actions", *actions)
    dependabot = ("vendor.dependabot", ".github/dependabot.yml")
    tools.run(session, "check_jsonschema", "--builtin-schema", *dependabot)
    tools.run_program(session, "shellcheck", *scripts)
    tools.run(session, "assay.cli", "runners", "check")
    # The first test waits for the download of GitHub's packages.
    words = ["packages/runners/tests/workflows", "--timeout=660"]
    tools.run(session, "pytest", *words, *session.posargs)


@nox.session
def repo(session: nox.Session) -> None:
    """Check the repository itself: import floors, workflows, README commands, links."""
    tools_environment(session).run(session, "pytest", "tests/repo", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation site into .nox/site. A broken link or anchor is an error."""
    words = ["-W", "--keep-going", "--quiet", "-c", "docs/site", ".", ".nox/site"]
    torch_environment(session).run(session, "sphinx", *words, *session.posargs)


@nox.session(default=False)
def check(session: nox.Session) -> None:
    """Check a model on the best device here, then show how a planted fault is found."""
    _check_and_plant(session, torch_environment(session, "core"), session.posargs)


def _check_and_plant(
    session: nox.Session, environment: Environment, options: Sequence[str]
) -> None:
    """Check a model, then plant a fault. Fail unless the model passes and the fault is found."""
    candidate = _run_option(session, environment, "--candidate", otherwise="sim/bfloat16")
    started = f"{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005 - a folder name, in local time
    command = ["assay.cli", "check", "generate", "micro:llama", *candidate, *options]
    if not _is_given(session, "--max-new-tokens"):
        # Half of the usual: enough steps to show a verdict, and a second run within 30 s.
        command += ["--max-new-tokens", "16"]
    if _is_given(session, "--help"):
        environment.run(session, *command)
        return
    clean = f"runs/{started}-clean"
    environment.run(session, *command, "--reference", "cpu/float32", "--output", clean)

    session.log("Now with a planted fault: this one has to FAIL.")
    planted = Path("runs") / f"{started}-planted"
    command += ["--golden", f"{clean}/golden", "--output", str(planted)]
    plant = ["--candidate-setup", "examples/down_proj_scaled.py:plant"]
    environment.run(session, *command, *plant, success_codes=[1])
    verdict = json.loads((planted / "verdict.json").read_text(encoding="utf-8"))
    if verdict["location"]["module"] != "model.layers.1.mlp.down_proj":
        session.error(f"the planted fault was found at the wrong place: {verdict['location']}")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build all packages into dist, then check a model with the wheels alone. `-- 3.11 3.14`."""
    release_packages(session, _check_and_plant)


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Plant every known fault and print which are found, and where. `-- --corpus published`."""
    _run_heavy_tests(session, "faults")


@nox.session(name="false-alarms", default=False)
def false_alarms(session: nox.Session) -> None:
    """Run correct variants that differ in their numbers: none may fail. `-- --corpus training`."""
    _run_heavy_tests(session, "false_alarms")


@nox.session(default=False)
def locked(session: nox.Session) -> None:
    """Hold all numbers to those of an earlier commit. `-- FOLDER --record`, then `-- FOLDER`."""
    torch_environment(session).run(session, "packages.core.tests.locked", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Mutate the files of every reader, and give commands hostile ones. `-- --seconds 60 --seed 1`."""
    torch_environment(session).run(session, "packages.core.tests.fuzz", *session.posargs)


@nox.session(default=False)
def perf(session: nox.Session) -> None:
    """Measure the cost of recording, metrics, checks and comparisons, as ratios."""
    # The published tool, to be timed beside ours; its metrics need no more than this of the rest.
    published = ("aiu-fms-testing-utils==0.9.0", "ibm-fms==1.13.1")
    # The tool whose comparison of dumps is timed, and what it imports.
    compared = (
        "mindstudio-probe==26.2.0", "matplotlib==3.11.2", "contourpy==1.3.3", "cycler==0.12.1",
        "fonttools==4.68.0", "kiwisolver==1.5.1", "pyparsing==3.3.3",
    )  # fmt: skip
    torch_environment(session).install(session, "--no-deps", *published, *compared)
    _run_heavy_tests(session, "perf")


@nox.session(default=False)
def smoke(session: nox.Session) -> None:
    """Train through set-up, checkpoint, resume, tear-down in every feature. `-- --coverage one`."""
    environment = torch_environment(session)
    run = _run_option(session, environment, "--run", otherwise="cpu/float32")
    command = ["smoke", "run"]
    if run and not _is_given(session, "--device"):
        command += ["--device", run[1].partition("/")[0]]
    if not session.posargs or session.posargs[0] == "-k":
        # Libraries with a command line of their own, beside the plan.
        files = sorted(Path("examples").glob("*/smoke*.toml"))
        command += [word for file in files for word in ("--with", f"command:{file}")]
    environment.run(session, "assay.cli", *command, *session.posargs)


@nox.session(name="smoke-faults", default=False)
def smoke_faults(session: nox.Session) -> None:
    """Plant every known fault of a training cycle: each has to fail by its name."""
    torch_environment(session).run(
        session, "pytest", "packages/smoke/tests/faults", "--timeout=300", *session.posargs
    )


@nox.session(default=False)
def expectations(session: nox.Session) -> None:
    """Verify the captured expectations of the best device here."""
    environment = torch_environment(session)
    run = _run_option(session, environment, "--run", otherwise="cpu/float32")
    # 3: nothing was captured on such a machine.
    codes = [0] if _must_be_judged(session) else [0, 3]
    environment.run(
        session, "assay.cli", "expect", "verify", *run, *session.posargs, success_codes=codes
    )


@nox.session(default=False)
def suites(session: nox.Session) -> None:
    """Hold models and decoders to what is expected of them, with pytest. `-- -k decoders`."""
    environment = torch_environment(session)
    run = _run_option(session, environment, "--assay-device", otherwise="cpu/float32")
    words = ["--pyargs", "assay_expectations.suites", "--timeout=600"]
    environment.run(session, "pytest", *words, *run, *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Tune a micro model in two ways, and hold what it is worth to the shipped baselines."""
    environment = torch_environment(session)
    if session.posargs:
        asks = session.posargs[0] == "run"
        run = _run_option(session, environment, "--run", otherwise="cpu/float32") if asks else []
        environment.run(session, "assay.cli", "bench", *session.posargs, *run)
        return
    started = f"{datetime.now():%Y%m%d-%H%M%S}"  # noqa: DTZ005 - a folder name, in local time
    folder = Path("runs") / f"{started}-bench"
    option, best = _run_option(session, environment, "--run", otherwise="cpu/float32")
    # As the baselines: what a lower precision costs is the question of another suite.
    run = [option, f"{best.partition('/')[0]}/float32"]
    tuned = ["--output", str(folder / "tuned")]
    environment.run(session, "assay.cli", "bench", "tune", "micro", *run, *tuned)
    unlike = [
        way for way in _TUNED_WAYS if not _hold_to_baseline(session, environment, way, folder, run)
    ]
    if unlike and _must_be_judged(session):
        session.error(f"{', '.join(unlike)} were held to no baseline: other questions were asked")
    if unlike:
        # Questions are made of this Python's own library: another one asks others.
        session.skip(
            f"{', '.join(unlike)} were asked other questions than the baselines; see"
            f" {folder}/*/compared/comparison.md"
        )


_TUNED_WAYS = ("full", "lora")
_BASELINES = Path("packages/bench/src/assay_bench/shipped")


def _hold_to_baseline(
    session: nox.Session, environment: Environment, way: str, folder: Path, run: list[str]
) -> bool:
    """Evaluate the model that was tuned in this way. Returns: False if its questions differ from the baseline's."""
    model = folder / "tuned" / "micro-llama" / way / "seed-0" / "model"
    asked, compared = folder / way / "asked", folder / way / "compared"
    command = ["assay.cli", "bench", "run", "--model", str(model), "--output", str(asked)]
    environment.run(session, *command, *run)
    baseline = _BASELINES / f"micro-llama-{way}.json"
    command = ["assay.cli", "bench", "compare", str(baseline), str(asked)]
    words = ["--suite", "retrained", "--output", str(compared)]
    environment.run(session, *command, *words, success_codes=[0, 3])
    judged = json.loads((compared / "comparison.json").read_text(encoding="utf-8"))["judged"]
    if judged == "UNDERPOWERED":
        session.error(f"too few items to say whether it is as good: {compared}/comparison.md")
    return bool(judged == "PASS")


@nox.session(name="bench-rates", default=False)
def bench_rates(session: nox.Session) -> None:
    """Measure the error rates of comparisons of models."""
    words = ["packages/bench/tests/rates", "--capture=no"]
    torch_environment(session).run(session, "pytest", *words, *session.posargs)


@nox.session(default=False)
def plan(session: nox.Session) -> None:
    """Say what a label or an event of GitHub starts. `-- smoke:nvidia --explain`."""
    tools_environment(session).run(session, "assay.cli", "runners", "plan", *session.posargs)


@nox.session(default=False)
def rehearse(session: nox.Session) -> None:
    """Run here, in a clean clone, what a label or an event would start. `-- smoke:nvidia`."""
    words = ["runners", "rehearse", "--nox", sys.executable, *session.posargs]
    tools_environment(session).run(session, "assay.cli", *words)


@nox.session(name="machine-job", default=False)
def machine_job(session: nox.Session) -> None:
    """Run a planned job on this machine: the sessions that ASSAY_JOB names, and its summary."""
    words = ["runners", "run", "--nox", sys.executable, *session.posargs]
    # The sessions need this environment anyway, and making another one takes a minute of every job.
    torch_environment(session).run(session, "assay.cli", *words)


@nox.session(default=False)
def recapture(session: nox.Session) -> None:
    """Capture what models give on the best device here, into runs/captured. `-- MODEL... --reason`."""
    environment = torch_environment(session)
    run = _run_option(session, environment, "--run", otherwise="cpu/float32")
    models = list(itertools.takewhile(lambda word: not word.startswith("-"), session.posargs))
    options = session.posargs[len(models) :]
    if not models:
        session.error("name the models: nox -s recapture -- micro:llama --reason TEXT")
    for model in models:
        words = ["expect", "capture", model, *run, "--output", "runs/captured", *options]
        environment.run(session, "assay.cli", *words)


@nox.session(default=False)
def propose(session: nox.Session) -> None:
    """Open the pull request of a recapture. `-- FOLDER`."""
    torch_environment(session).run(session, "assay.cli", "runners", "propose", *session.posargs)


@nox.session(name="report-nightly", default=False)
def report_nightly(session: nox.Session) -> None:
    """Keep the issues that say how the nightly run stands, and whether the machines need a newer runner."""
    words = ["runners", "report-nightly", *session.posargs]
    tools_environment(session).run(session, "assay.cli", *words)


@nox.session(default=False)
def reap(session: nox.Session) -> None:
    """End the cloud instances that outlived their lifetime."""
    tools_environment(session).run(session, "assay.cli", "runners", "reap", *session.posargs)


def best_run(devices: list[dict[str, Any]], otherwise: str) -> str:
    """Return the RUN for a machine whose `assay devices --json` lists `devices`.

    otherwise: the RUN where there is no accelerator.
    """
    present = [device["device"] for device in devices if device["status"] == "present"]
    accelerators = [name for name in present if name not in ("cpu", "sim")]
    return f"{accelerators[0]}/bfloat16" if accelerators else otherwise


# Drivers may take long to start: a session waits, where a person would not.
_LIST_DEVICES = ("assay.cli", "devices", "--json", "--timeout", "60")


def _run_option(
    session: nox.Session, environment: Environment, option: str, otherwise: str
) -> list[str]:
    """Return the option with the best RUN here, or nothing if the caller gives it."""
    if _is_given(session, option):
        return []
    devices = json.loads(environment.read(session, *_LIST_DEVICES))["devices"]
    run = best_run(devices, otherwise)
    if run == otherwise and _hardware_promised(session):
        session.error(
            "ASSAY_REQUIRE_HARDWARE=1, but no accelerator can be used here; `assay devices` says"
            " what is missing"
        )
    return [option, run]


def _is_given(session: nox.Session, option: str) -> bool:
    return any(argument.partition("=")[0] == option for argument in session.posargs)


def _must_be_judged(session: nox.Session) -> bool:
    """Return True if an uncompared part is a failure: on GitHub, or with a promised accelerator."""
    return _hardware_promised(session) or os.environ.get("GITHUB_ACTIONS") == "true"


def _hardware_promised(session: nox.Session) -> bool:
    """Return True if the caller promises an accelerator, whose absence is then a failure."""
    value = os.environ.get("ASSAY_REQUIRE_HARDWARE", "")
    if value not in ("", "0", "1"):
        session.error(f"ASSAY_REQUIRE_HARDWARE is {value!r}; it must be 1, 0 or unset")
    return value == "1"


def _run_heavy_tests(session: nox.Session, folder: str) -> None:
    # Tables are what these sessions are run for: they are printed, not captured. One test is a
    # whole corpus, an hour beside other work; what can hang has a limit of its own.
    words = [f"packages/core/tests/{folder}", "--capture=no", "--timeout=14400"]
    torch_environment(session).run(session, "pytest", *words, *session.posargs)
