#!/usr/bin/env bash
# Rendered by `assay runners render`: edit runners/*.toml or its template, not this file.
#
# Check with the vendor's own program that the cards of this machine are fit for a job.
#
#   health.sh [SETTINGS.json]
#
# SETTINGS.json         the program and the pattern of a fit card, default: health.json next to this script
# ASSAY_CARDS           the number of cards that must be fit, default 1
# ASSAY_HEALTH_SECONDS  the time limit of the program, default 60
#
# Exit code: 0 the cards are fit; 75 the machine must not be used, and stderr says why.
set -euo pipefail

if ! command -v python3 >/dev/null; then
    echo "assay: this machine must not be used: it has no python3" >&2
    exit 75
fi

# -I: Python imports nothing from the folder or the environment of a job.
exec python3 -I - "${1:-$(dirname "${BASH_SOURCE[0]}")/health.json}" <<'PYTHON'
import json
import os
import re
import signal
import subprocess
import sys


def find_sickness():
    """Say why the machine must not be used; otherwise print the number of its cards and return ""."""
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            settings = json.load(file)
        # The program prints one match of the pattern for each card that is fit.
        command, pattern = settings["command"], settings["card_pattern"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{sys.argv[1]} cannot be read: {error!r}"
    cards = int(os.environ.get("ASSAY_CARDS", "1"))
    seconds = float(os.environ.get("ASSAY_HEALTH_SECONDS", "60"))
    program = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{program} cannot be run: {error.strerror}"
    try:
        output, errors = (text.decode(errors="replace") for text in process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        # Do not wait: a process that hangs in its driver survives the signal.
        os.killpg(process.pid, signal.SIGKILL)
        return f"{program} did not answer within {seconds:g} s"
    if process.returncode:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        return f"{program} exits with {process.returncode}: {''.join(last)}"
    found = len(re.findall(pattern, output, re.MULTILINE))
    if found < cards:
        printed = " ".join(output.split())[:200] or "nothing"
        return f"{program} lists {found} fit cards; {cards} were promised; it prints {printed}"
    print(f"assay: {program} lists {found} fit cards", flush=True)
    return ""


try:
    sickness = find_sickness()
except ValueError as error:
    sickness = f"ASSAY_CARDS or ASSAY_HEALTH_SECONDS is not a number: {error}"
if sickness:
    print(f"assay: this machine must not be used: {sickness}", file=sys.stderr, flush=True)
    os._exit(75)
PYTHON
