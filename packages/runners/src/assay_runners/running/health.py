"""Whether a machine's cards are there and answer, by the script that its own runner calls, too."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

_TOLD = "assay: this machine must not be used: "
# The script ends by itself, even where the vendor's program hangs.
_SECONDS = 120


def find_sickness(script: Path, settings: Path, cards: int, variables: Mapping[str, str]) -> str:
    """Why the machine must not be used; "" where it may.

    script: `runners/health.sh`.
    settings: `runners/VENDOR/health.json`.
    cards: how many have to answer.
    variables: of its environment.
    """
    env = {**variables, "ASSAY_CARDS": str(cards)}
    try:
        done = subprocess.run(
            [script, settings], capture_output=True, text=True, check=False, timeout=_SECONDS, env=env,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{script.name} cannot be run: {error}"
    if not done.returncode:
        return ""
    told = done.stderr.strip() or f"{script.name} exits with {done.returncode}"
    return told.removeprefix(_TOLD)
