"""Rows of measurements.jsonl from a replay: statistics, tokens, accumulated errors."""

from typing import Any

from assay.comparing.judge import Judged
from assay.comparing.results import PortResult, ReplayResults
from assay.comparing.token_rows import TokenPort, TokenRows
from assay.generate.judging.evidence import GenerateEvidence
from assay.verdicts import Measurement


def replay_rows(
    judged: list[Judged], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    """List every judged statistic, and for every stage and token the worst of its ports."""
    rows = [
        Measurement(
            **_place(item.port), statistic=item.ratio.statistic, actual=item.ratio.actual,
            expected=item.ratio.expected, ratio=item.ratio.value, limit=item.limit,
        )
        for item in judged
    ]  # fmt: skip
    ports = {(item.port.module, item.port.port): item.port for item in judged}
    return rows + _token_rows(ports, noise, evidence)


def _token_rows(
    ports: dict[tuple[str, str], PortResult], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    floor = evidence.unit_roundoff / 2
    measured = [
        TokenPort(
            port, known.sums.rows if (known := noise.ports.get(key)) else [], floor, _place(port)
        )
        for key, port in ports.items()
    ]
    return list(TokenRows(measured, lambda *token: evidence.call_of(evidence.token(*token))[1]))


def drift_rows(judged: list[Judged], evidence: GenerateEvidence) -> list[Measurement]:
    """List the error that accumulates along the depth in a forced run, of both runs."""
    if "drift" not in evidence.candidate.attachments:
        return []
    actual: dict[str, float] = evidence.candidate.attachment_json("drift")  # type: ignore[assignment]
    noise: dict[str, float] = evidence.section.trace.attachment_json("noise-drift")  # type: ignore[assignment]
    floor = evidence.unit_roundoff / 2
    order: dict[str, int] = {}
    for item in judged:
        order.setdefault(item.port.stage.module, item.port.order)
    return [
        Measurement(
            level="modules", module=module, port="output", order=order[module],
            statistic="accumulated", actual=error, expected=noise.get(module, 0.0),
            ratio=error / max(noise.get(module, 0.0), floor),
        )
        for module, error in actual.items()
        if module in order
    ]  # fmt: skip


def _place(port: PortResult) -> dict[str, Any]:
    """Return the columns that locate a row: the stage, and the port relative to it."""
    own = port.module == port.stage.module
    return {
        "level": "inputs" if port.stage.phase == "inputs" else "modules",
        "module": port.stage.module,
        "port": port.port if own else f"{port.module}:{port.port}",
        "phase": port.stage.phase,
        "order": port.order,
    }
