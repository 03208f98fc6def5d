"""A fleet of three invented vendors, and fixtures that render it and run its scripts."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import pytest

from assay_runners.fleet import GITHUB_FILE, RUNNERS_FILE, Fleet, read_fleet
from assay_runners.rendering import render_fleet, write_rendered

# A vendor with all fields of an entry, one without accelerators, and one without pods.
ENTRIES = r"""# `assay runners render` reads this file.
[acme]
title = "Acme Rocket"
resources = ["acme.com/rocket", "acme.com/missile"]
scheduler = "rocket-scheduler"
shown.by = ["dev/rocket[0-9]*", "dev/launch pad"]
torch = { from_registry = false, plugin = "torch_rocket" }
image = { base = "acme.example/pytorch:2.1", python = "/opt/acme/bin/python" }
health = { command = ["acme-smi", "--list", "it's \"all\""], card_pattern = "^card \\d+ \"ok\"$" }
variables = { ROCKET_FUEL = "don't use $HOME or \"/\"" }
model_cache = "/srv/models"
runners = [
  { cards = 1, sessions = ["check", "smoke"], timeout_minutes = 60, budget_minutes = 30, max_runners = 3 },
  { cards = 8, sessions = ["smoke"], timeout_minutes = 90, budget_minutes = 30, max_runners = 1 },
]
unverified = ["health", "scheduler"]

[plain]
title = "no accelerator"
resources = []
shown.by = []
torch.from_registry = true
image.base = ""
runners = [
  { cards = 0, sessions = ["smoke"], timeout_minutes = 20, budget_minutes = 10, max_runners = 2 },
]

[slab]
title = "a desk"
resources = []
shown.by = ["Library/Slab.bundle"]
torch.from_registry = true
health = { command = ["slab_profiler"], card_pattern = "Slab" }
runners = [
  { cards = 1, sessions = ["smoke"], timeout_minutes = 20, budget_minutes = 10, max_runners = 1 },
]
"""
GITHUB = """
server = "github.com"
repository = "acme-org/assay"
protected_ref = "main"
runner_group = "rockets"
hosted = "ubuntu-24.04"
pythons = ["3.11"]
bench_python = "3.11.2"
runner_version = "2.400.1"
runner_digest = "sha256:5555555555555555555555555555555555555555555555555555555555555555"
nightly = "0 2 * * *"
reaper = "0 * * * *"
"""

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a checkout with the two files that describe the machines."""
    checkout = tmp_path / "checkout"
    (checkout / "runners").mkdir(parents=True)
    (checkout / RUNNERS_FILE).write_text(ENTRIES)
    (checkout / GITHUB_FILE).write_text(GITHUB)
    return checkout


@pytest.fixture
def fleet(root: Path) -> Fleet:
    return read_fleet(root)


@pytest.fixture
def rendered(fleet: Fleet) -> Mapping[str, str]:
    """Render the text of every file, by its path below runners/."""
    files = render_fleet(fleet)
    return {str(path.relative_to(PurePosixPath("runners"))): text for path, text in files.items()}


@pytest.fixture
def written(root: Path, fleet: Fleet) -> Path:
    """Write all files. Returns: the folder runners/."""
    write_rendered(root, fleet)
    return root / "runners"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Make the folder of fake programs, the first on PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    return folder


@pytest.fixture
def put_program(programs: Path) -> Callable[[str, str], Path]:
    """Write a fake program from a shell script."""

    def put(name: str, script: str) -> Path:
        program = programs / name
        program.write_text(f"#!/usr/bin/env bash\n{script}\n")
        program.chmod(0o755)
        return program

    return put


@pytest.fixture
def call(programs: Path) -> Call:
    """Run a script with bash, the fake programs, and only the given variables."""

    def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        bash = shutil.which("bash")
        assert bash, "there is no bash"
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [bash, str(script), *arguments],
            env={"PATH": path, **variables},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    return run
