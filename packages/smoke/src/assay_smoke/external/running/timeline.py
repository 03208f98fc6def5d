"""The phases of a run as the page of a session draws them."""

from pathlib import Path

from assay.files import write_whole
from assay_smoke.cases.timeline import CyclePhase, PhaseTime
from assay_smoke.external.running.launches import RunEvidence

# As a session calls the processes of its cases; a run without a name there has its own.
_WORLDS = {"uninterrupted": "train", "interrupted": "terminate", "resumed": "resume"}


def write_timeline(run: RunEvidence, folder: Path) -> None:
    """Write when each phase of a run began and ended into timelines/WORLD/rank-0.jsonl.

    A step ends as its loss is logged; what is saved after it is in the time of the next one.
    """
    launch = run.launch
    device = 0 if run.on_device is None else run.on_device.peak_bytes
    ends = [*run.logged_at, run.ended_at]
    names: list[tuple[CyclePhase, int | None]] = [("set-up", None)]
    names += [("step", launch.first_step + 2 + index) for index in range(len(run.logged_at) - 1)]
    if run.logged_at:
        names.append(("tear-down", None))
    rows = [
        PhaseTime(
            phase=phase,
            number=number,
            begin=begin,
            end=None if run.hung_in is not None and end == run.ended_at else end,
            host_bytes=run.host.peak_bytes,
            device_bytes=device,
        )
        for (phase, number), begin, end in zip(names, [run.began_at, *ends], ends, strict=False)
    ]
    path = folder / "timelines" / _WORLDS.get(launch.name, launch.name) / "rank-0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(row.model_dump_json() + "\n" for row in rows))
