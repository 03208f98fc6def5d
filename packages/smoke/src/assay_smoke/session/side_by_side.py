"""Runs items at the same time, each in a process that sees only its own devices."""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import psutil

from assay.errors import AssayError
from assay.runs import Progress, run_process
from assay.runs.worker import serve
from assay.verdicts import Outcome
from assay_smoke.machine.failures import failed_part
from assay_smoke.session.items import SessionItem
from assay_smoke.session.packing import Packing
from assay_smoke.session.results import CaseResult
from assay_smoke.session.retries import run_with_retry

_MODULE = "assay_smoke.session.side_by_side"


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of this machine."""

    count: int
    visible: str
    """Environment variable with the numbers of the devices that a process may use."""


def run_side_by_side(
    items: Sequence[SessionItem], devices: Devices, folder: Path, progress: Progress
) -> Iterator[CaseResult]:
    """Yield the result of each item when it ends. The largest items start first."""
    packing = Packing(
        range(len(items)),
        lambda number: items[number].num_cards or devices.count,
        devices.count,
    )
    running: dict[Future[CaseResult], int] = {}
    with ThreadPoolExecutor(devices.count) as pool:
        try:
            while True:
                for number, cards in packing.start():
                    visible = {devices.visible: ",".join(map(str, cards))}
                    task = pool.submit(_run_beside, items[number], visible, folder, progress)
                    running[task] = number
                if not running:
                    return
                for task in wait(running, return_when=FIRST_COMPLETED).done:
                    packing.finish(running.pop(task))
                    yield task.result()
        except BaseException:
            _end_all()
            raise


def _run_beside(
    item: SessionItem, visible: dict[str, str], folder: Path, progress: Progress
) -> CaseResult:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    request = {"item": item.model_dump(), "folder": str(folder)}
    begun = time.monotonic()
    try:
        answer = run_process(
            _MODULE, request, logs, name=item.name, progress=progress, environment=visible
        )
    except AssayError as error:  # the process was killed, for example for lack of memory
        return CaseResult(
            name=item.name,
            outcome=Outcome.FAIL,
            seconds=time.monotonic() - begun,
            reason=f"run: {error}",
            infrastructure=failed_part(str(error)),
            command=item.command,
            folder=f"cases/{item.name}",
        )
    return CaseResult.model_validate(answer.result)


def _end_all() -> None:
    """End the processes of all items. They end their own children."""
    for child in psutil.Process().children():
        try:
            if _MODULE in child.cmdline():
                child.terminate()
        except psutil.Error:
            continue


def _work(request: dict[str, object], progress: Progress) -> dict[str, object]:
    item = SessionItem.model_validate(request["item"])
    result = run_with_retry(item, Path(str(request["folder"])), progress)
    made: dict[str, object] = json.loads(result.model_dump_json(by_alias=True))
    return made


if __name__ == "__main__":
    serve(_work)
