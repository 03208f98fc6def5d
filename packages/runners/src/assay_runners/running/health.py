"""Whether a machine's cards are there and answer, by their vendor's own program."""

import re
import subprocess
from collections.abc import Mapping

from assay_runners.fleet.entries import Health

_SECONDS = 60


def find_sickness(health: Health, cards: int, variables: Mapping[str, str]) -> str:
    """Why the machine must not be used; "" where it may.

    cards: how many have to answer.
    variables: of the environment of the vendor's program.
    """
    program = health.command[0]
    try:
        done = subprocess.run(
            health.command,
            capture_output=True, text=True, check=False, timeout=_SECONDS, env=dict(variables),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        return f"{program} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{program} did not answer within {_SECONDS} s"
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return f"{program} exits with {done.returncode}: {''.join(last)}"
    found = len(re.findall(health.card_pattern, done.stdout, re.MULTILINE))
    if found < cards:
        return f"{program} lists {found} cards; {cards} were promised"
    return ""
