#!/usr/bin/env bash
# Rendered from runners/runners.toml by `assay runners render`; edit that.
# Exits with 75 unless the cards of this machine answer. GitHub's runner calls it before and after each
# job; it takes nothing but scripts of bash there.
exec python3 - <<'PYTHON'
import os
import re
import subprocess
import sys

COMMAND = ["nvidia-smi", "--list-gpus"]
CARD = "^GPU \\d+:"
SICK = 75


def find_sickness(cards: int) -> str:
    """Why no job may run here; "" where one may."""
    try:
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        return f"{COMMAND[0]} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{COMMAND[0]} did not answer within 60 s"
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return f"{COMMAND[0]} exits with {done.returncode}: {''.join(last)}"
    found = len(re.findall(CARD, done.stdout, re.MULTILINE))
    return "" if found >= cards else f"{COMMAND[0]} lists {found} cards; {cards} were promised"


if __name__ == "__main__":
    sickness = find_sickness(int(os.environ.get("ASSAY_CARDS", "1")))
    if sickness:
        sys.stderr.write(f"this machine takes no jobs: {sickness}\n")
        sys.exit(SICK)
PYTHON
