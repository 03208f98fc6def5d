"""The process of an item in test_side_by_side.py. With one device, it waits for another item."""

import os
import signal
import time

from assay.runs import Progress
from assay.verdicts import Outcome
from assay_smoke.session.command import CaseResult, ItemRequest

SECONDS = 20


def run_item(request: ItemRequest, _: Progress) -> CaseResult:
    item, folder = request
    name = item.name
    devices = os.environ["TEST_VISIBLE_DEVICES"]
    (folder / name).touch()
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + SECONDS
    partner = {"left": "right", "right": "left"}.get(name)
    while partner is not None and not (folder / partner).exists() and time.monotonic() < end:
        time.sleep(0.01)
    together = partner is not None and (folder / partner).exists()
    return CaseResult(
        name=name,
        outcome=Outcome.PASS,
        seconds=1.0,
        reason=f"{devices} {'together' if together else 'alone'}",
    )
