"""Python environments whose speed is measured: this one, or another with a torch of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from assay.errors import MachineError, UsageError
from assay_bench.performance.suite_table import SUITES, SpeedSuite, UnknownSuiteError

# A first start reads torch's metadata from a cold disk.
_PROBE_SECONDS = 120

# Set where this process was started; another environment is what is installed in it.
_VARIABLES_OF_THIS_ONE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
from assay_bench.performance.suite_table import SUITES
import pytest_benchmark.plugin
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
print(json.dumps({
    "nodes": {name: suite.node for name, suite in SUITES.items()},
    "versions": {name: known(name) for name in
                 ("torch", "transformers", "assay-core", "assay-bench", "numpy")},
}))
"""


class EnvironmentUnusableError(UsageError):
    """Something that was named as an environment, and in which nothing can be measured."""

    @classmethod
    def without_python(cls, path: Path) -> Self:
        """There is no interpreter."""
        return cls(
            f"{path} is no environment: neither a folder with bin/python nor a Python executable"
        )

    @classmethod
    def without_suites(cls, path: Path, problem: str) -> Self:
        """`problem`: the last line of what its Python printed."""
        return cls(
            f"{path} is no Python with the suites of assay-bench ({problem}); install it there with pip"
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python with the suites.

    nodes: for each suite what its pytest is given. versions: of what decides its speed.
    variables: of its processes.
    """

    name: str
    python: Path
    nodes: Mapping[str, str]
    versions: Mapping[str, str]
    variables: Mapping[str, str]

    @classmethod
    def current(cls) -> Self:
        """The one of this process."""
        nodes = {name: suite.node for name, suite in SUITES.items()}
        return cls("this environment", Path(sys.executable), nodes, {}, dict(os.environ))

    @classmethod
    def at(cls, path: Path) -> Self:
        """The virtual environment in a folder, or that of an executable.

        Raises: EnvironmentUnusableError if it has no Python or no suites; MachineError if its
            Python does not answer.
        """
        python = _find_python(path)
        variables = {
            name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_THIS_ONE
        }
        try:
            done = subprocess.run(
                [python, "-P", "-c", _PROBE],
                capture_output=True, text=True, check=False, env=variables, timeout=_PROBE_SECONDS,
            )  # fmt: skip
        except OSError as error:
            raise EnvironmentUnusableError.without_python(path) from error
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{python} gave no answer within {_PROBE_SECONDS} s") from error
        try:
            answer = json.loads(done.stdout)
            return cls(str(path), python, answer["nodes"], answer["versions"], variables)
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise EnvironmentUnusableError.without_suites(python, lines[-1]) from None

    def nodes_of(self, suites: Sequence[SpeedSuite]) -> list[str]:
        """What its pytest is given for `suites`. Raises: UnknownSuiteError for one that it lacks."""
        for suite in suites:
            if suite.name not in self.nodes:
                raise UnknownSuiteError.of(suite.name, tuple(self.nodes), f" in {self.name}")
        return [self.nodes[suite.name] for suite in suites]


def _find_python(path: Path) -> Path:
    candidates = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    if path.is_file():
        candidates = [path]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: a virtual environment is found by the path of its link.
            return candidate.absolute()
    raise EnvironmentUnusableError.without_python(path)
