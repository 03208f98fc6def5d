"""The process of an item in test_side_by_side.py. With one device, it waits for another item."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve

SECONDS = 20


def work(request: dict[str, Any], _: Progress) -> dict[str, Any]:
    item, folder = request["item"], Path(request["folder"])
    name, devices = item["name"], os.environ["TEST_VISIBLE_DEVICES"]
    (folder / name).touch()
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + SECONDS
    partner = {"left": "right", "right": "left"}.get(name)
    while partner is not None and not (folder / partner).exists() and time.monotonic() < end:
        time.sleep(0.01)
    together = partner is not None and (folder / partner).exists()
    return {
        "name": name,
        "outcome": "PASS",
        "seconds": 1.0,
        "reason": f"{devices} {'together' if together else 'alone'}",
    }


if __name__ == "__main__":
    serve(work)
