#!/usr/bin/env bash
# Rendered by `assay runners render`: edit runners/*.toml or its template, not this file.
#
# Are the cards of this machine fit for a job? Asked of the vendor's own program, before and after each.
#
# ASSAY_CARDS           how many cards have to be fit, default 1
# ASSAY_HEALTH_SECONDS  how long the program may take, default 60
#
# Exit code: 0 they are; 75 the machine must not be used, and why on stderr.
set -euo pipefail

if ! command -v python3 >/dev/null; then
    echo "assay: this machine must not be used: it has no python3" >&2
    exit 75
fi

# -I: nothing is imported from the folder or the environment of a job.
exec python3 -I - <<'PYTHON'
import os
import re
import signal
import subprocess
import sys

COMMAND = ['npu-smi', 'info', '-l']
# What the program prints once for each card that is fit.
CARD = 'NPU ID'


def find_sickness():
    """Why the machine must not be used; "" where it may, with the number of its cards on stdout."""
    cards = int(os.environ.get("ASSAY_CARDS", "1"))
    seconds = float(os.environ.get("ASSAY_HEALTH_SECONDS", "60"))
    try:
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{COMMAND[0]} cannot be run: {error.strerror}"
    try:
        output, errors = (text.decode(errors="replace") for text in process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        # It is not waited for: a process that hangs in its driver does not end when it is killed.
        os.killpg(process.pid, signal.SIGKILL)
        return f"{COMMAND[0]} did not answer within {seconds:g} s"
    if process.returncode:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        return f"{COMMAND[0]} exits with {process.returncode}: {''.join(last)}"
    found = len(re.findall(CARD, output, re.MULTILINE))
    if found < cards:
        printed = " ".join(output.split())[:200] or "nothing"
        return f"{COMMAND[0]} lists {found} fit cards; {cards} were promised; it prints {printed}"
    print(f"assay: {COMMAND[0]} lists {found} fit cards", flush=True)
    return ""


try:
    sickness = find_sickness()
except ValueError as error:
    sickness = f"ASSAY_CARDS or ASSAY_HEALTH_SECONDS is no number: {error}"
if sickness:
    print(f"assay: this machine must not be used: {sickness}", file=sys.stderr, flush=True)
    os._exit(75)
PYTHON
