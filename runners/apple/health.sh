#!/usr/bin/env bash
# Rendered from runners/runners.toml by `assay runners render`; edit that.
# Exits with 75 unless the cards of this machine answer. GitHub's runner calls it before and after each
# job; it takes nothing but scripts of bash there.
set -euo pipefail
if ! command -v python3 >/dev/null; then
  echo "this machine takes no jobs: it has no python3" >&2
  exit 75
fi
# -I: nothing is imported from the folder or the environment of a job.
exec python3 -I - <<'PYTHON'
import os
import re
import signal
import subprocess
import sys

COMMAND = ["system_profiler", "SPDisplaysDataType"]
CARD = "Chipset Model: Apple"
SECONDS = float(os.environ.get("ASSAY_HEALTH_SECONDS", "60"))
SICK = 75


def find_sickness(cards):
    """Why no job may run here; "" where one may."""
    try:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )
    except OSError as error:
        return f"{COMMAND[0]} cannot be run: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        # It is not waited for: what hangs in a driver does not end when it is killed.
        os.killpg(process.pid, signal.SIGKILL)
        return f"{COMMAND[0]} did not answer within {SECONDS:g} s"
    if process.returncode:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        return f"{COMMAND[0]} exits with {process.returncode}: {''.join(last)}"
    found = len(re.findall(CARD, output, re.MULTILINE))
    return "" if found >= cards else f"{COMMAND[0]} lists {found} cards; {cards} were promised"


sickness = find_sickness(int(os.environ.get("ASSAY_CARDS", "1")))
if sickness:
    print(f"this machine takes no jobs: {sickness}", file=sys.stderr, flush=True)
    os._exit(SICK)
PYTHON
