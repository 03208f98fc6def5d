"""Another Python environment, in which the candidate's processes run."""

import json
import os
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

from assay.errors import UsageError
from assay.launch.process_groups import own_variables

_NAME = "assay-core"
_SECONDS = 60.0
_ASK = f"""
import json
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("{_NAME}")
    import assay.launch.fork_server
except PackageNotFoundError:
    found = None
sys.stdout.write(json.dumps(found))
"""


@cache
def require_same_assay(python: Path) -> None:
    """Raise UsageError, in one sentence, unless `python` runs and has this version of assay."""
    here = version(_NAME)
    found = _ask(python)
    if found != here:
        what = f"has assay {found}, and this is {here}" if found else "has no assay"
        raise UsageError(
            f"--candidate-python {python} {what}: {python} -m pip install {_NAME}=={here}"
        )


def _ask(python: Path) -> str | None:
    """Return the version of assay that `python` has; None without it."""
    command, variables = [str(python), "-P", "-c", _ASK], own_variables(python, os.environ)
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--candidate-python {python} cannot be run: {error}") from None
    try:
        answer: str | None = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed no answer"]
        raise UsageError(f"--candidate-python {python} does not work: {last[0]}") from None
    return answer
