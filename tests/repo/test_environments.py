"""Pins of an image's own Python, such as NVIDIA's PIP_CONSTRAINT, and what the sessions install."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from environments import shared
from environments.shared import Environment
from environments.torch_choice import TorchBuild, TorchChoice


class Session:
    """Records what pip is asked for."""

    def __init__(self, *held: str) -> None:
        self.held = held
        self.pip: list[tuple[list[str], dict[str, str]]] = []

    def run_install(self, *words: str, env: dict[str, str]) -> None:
        self.pip.append(([*words], env))

    def run(self, *_words: str, **_options: Any) -> str:
        cached = {"name": "numpy", "location": "/cached/lib"}
        held = [{"name": name, "location": "/usr/lib"} for name in self.held]
        return json.dumps([cached, *held])


def pins_of(folder: Path, choice: TorchChoice, *held: str) -> list[str]:
    session: Any = Session(*held)
    shared._install_packages(session, Environment(folder), choice, "core")
    for words, env in session.pip:
        assert env == {"PIP_CONSTRAINT": ""}
        assert f"--constraint={folder / 'torch-constraint.txt'}" in words
    first, _ = session.pip[0]
    ours = next(word for word in first if word.startswith("--constraint="))
    return Path(ours.partition("=")[2]).read_text(encoding="utf-8").splitlines()


def test_our_pins_hold_for_packages_that_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cached package may be of an older commit.
    monkeypatch.setenv("ASSAY_PACKAGES", "/cached")
    machine = TorchChoice(TorchBuild.MACHINE, "its own")
    pins = pins_of(tmp_path, machine, "torch", "Typing.Extensions")
    names = {line.partition("==")[0] for line in pins}
    assert {"numpy", "typing-inspection"} <= names
    assert not {"torch", "typing_extensions", "typing-extensions"} & names


def test_our_pins_all_hold_beside_our_own_torch(tmp_path: Path, root: Path) -> None:
    pins = pins_of(tmp_path, TorchChoice(TorchBuild.CPU, "none shown"), "numpy")
    assert pins == (root / "constraints.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("has_nox", "of_image", "expected"),
    [(True, "c.txt", []), (False, "c.txt", ["c.txt"]), (False, "", ["constraints.txt"])],
)
def test_a_job_installs_nox_only_where_it_is_absent(
    root: Path, tmp_path: Path, has_nox: bool, of_image: str, expected: list[str]
) -> None:
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\n[ "$2" != nox ] || exit {int(not has_nox)}\necho "$PIP_CONSTRAINT" >> pins\n'
    )
    python.chmod(0o755)
    action = YAML(typ="safe").load(root / ".github/actions/setup/action.yml")
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PIP_CONSTRAINT": of_image}
    command = action["runs"]["steps"][-1]["run"]
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=variables, check=True)
    pins = tmp_path / "pins"
    assert (pins.read_text().split() if pins.exists() else []) == expected


def test_installed_packages_are_compiled_but_for_templates_and_tests(tmp_path: Path) -> None:
    tmp_path /= "tests"  # of the path, only what is below the packages counts

    class Running:
        def run_install(self, *words: str, success_codes: list[int]) -> None:
            assert subprocess.run(words, check=False).returncode in success_codes

    (tmp_path / "bin").mkdir(parents=True)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    packages = shared.packages_folder(tmp_path)
    for module in ("right", "numpy/tests/test_all", "transformers/models/bert", "models/right"):
        (packages / module).parent.mkdir(parents=True, exist_ok=True)
        (packages / f"{module}.py").write_text("value = 1\n")
    (packages / "template.py").write_text("value = {{ value }\n")
    session: Any = Running()
    Environment(tmp_path).compile(session)
    compiled = sorted(packages.rglob("*.pyc"))
    assert [path.name.split(".")[0] for path in compiled] == ["right", "right"]
