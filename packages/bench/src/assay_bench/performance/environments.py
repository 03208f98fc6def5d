"""Python environments whose speed is measured: this one, or another one."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from assay.errors import MachineError, UsageError
from assay_bench.performance.suite_table import SUITES, SpeedSuite, make_unknown_suite_error

# The first start can read torch's metadata from a cold disk.
_PROBE_SECONDS = 120

# Another environment must use only its own packages.
_VARIABLES_OF_THIS_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
from assay_bench.performance.suite_table import SUITES
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
print(json.dumps({
    "suites": list(SUITES),
    "versions": {name: known(name) for name in
                 ("torch", "transformers", "assay-core", "assay-bench", "numpy")},
}))
"""


def _make_no_python_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not an environment: neither a folder with bin/python nor a Python executable"
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment with the suites."""

    name: str
    python: Path
    suites: Collection[str]
    """Names of its suites."""
    versions: Mapping[str, str]
    """Versions of the packages that affect speed."""
    variables: Mapping[str, str]
    """Environment variables of its processes."""

    @classmethod
    def current(cls) -> Self:
        """Return the environment of this process."""
        return cls("this environment", Path(sys.executable), list(SUITES), {}, dict(os.environ))

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a virtual environment by its folder or its Python executable.

        Raises: UsageError if it has no Python or no suites; MachineError if its
            Python does not respond.
        """
        python = _find_python(path)
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in _VARIABLES_OF_THIS_ENVIRONMENT
        }
        try:
            done = subprocess.run(
                [python, "-P", "-c", _PROBE],
                capture_output=True, text=True, check=False, env=variables, timeout=_PROBE_SECONDS,
            )  # fmt: skip
        except OSError as error:
            raise _make_no_python_error(path) from error
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{python} did not respond within {_PROBE_SECONDS} s") from error
        try:
            answer = json.loads(done.stdout)
            return cls(str(path), python, answer["suites"], answer["versions"], variables)
        except (ValueError, KeyError, TypeError):
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise UsageError(
                f"{python} lacks the suites of assay-bench ({lines[-1]}); install assay-bench there with pip"
            ) from None

    def require(self, suites: Sequence[SpeedSuite]) -> None:
        """Raise UsageError for a missing suite."""
        for suite in suites:
            if suite.name not in self.suites:
                raise make_unknown_suite_error(suite.name, tuple(self.suites), f" in {self.name}")


def _find_python(path: Path) -> Path:
    candidates = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    if path.is_file():
        candidates = [path]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: Python finds a virtual environment by the path of the link.
            return candidate.absolute()
    raise _make_no_python_error(path)
