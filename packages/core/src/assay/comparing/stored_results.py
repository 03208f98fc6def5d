"""Measurements of a replay, stored with a trace by the process that ran and read by the judge."""

from typing import Any

from assay.comparing.results import ReplayResults
from assay.trace import Trace, TraceWriter


def attach_results(writer: TraceWriter, name: str, results: ReplayResults) -> None:
    """Store `results` under `name`. Raises: as `TraceWriter.attach`."""
    data, sums = results.to_parts()
    writer.attach_json(name, data)
    writer.attach(_sums_of(name), sums)


def read_results(trace: Trace, name: str) -> ReplayResults:
    """Read the results that `attach_results` stored under `name`. Raises: as `Trace.attachment`."""
    data: Any = trace.attachment_json(name)
    return ReplayResults.from_parts(data, trace.attachment(_sums_of(name)))


def _sums_of(name: str) -> str:
    return f"{name}-sums"
