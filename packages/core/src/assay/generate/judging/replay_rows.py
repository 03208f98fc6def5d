"""Rows of measurements.jsonl that a replay gives: statistics, tokens, accumulated errors.

Shape legend: R rows of a port, T tokens, P prompts, S positions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from assay.comparing.judge import Judged
from assay.comparing.results import PortResult, ReplayResults
from assay.generate.judging.evidence import GenerateEvidence
from assay.metrics import RowErrors
from assay.verdicts import Measurement

if TYPE_CHECKING:
    from assay.stages import Stage


def replay_rows(
    judged: list[Judged], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    """Every judged statistic, and for every stage and token the worst of its ports."""
    rows = [
        Measurement(
            **_place(item.port), statistic=item.ratio.statistic, actual=item.ratio.actual,
            expected=item.ratio.expected, ratio=item.ratio.value, limit=item.limit,
        )
        for item in judged
    ]  # fmt: skip
    ports = {(item.port.module, item.port.port): item.port for item in judged}
    return rows + _token_rows(ports, noise, evidence)


def drift_rows(judged: list[Judged], evidence: GenerateEvidence) -> list[Measurement]:
    """The error that accumulates along the depth in an ordinary run, of candidate and noise run."""
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


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens, numbered in the order of prompt and position.

    numbers_PS: by prompt and position; -1 where there is no token.
    addresses_T2: prompt and position of each token.
    """

    numbers_PS: Tensor
    addresses_T2: Tensor

    @classmethod
    def of(cls, ports: Iterable[PortResult]) -> Self:
        """All tokens of these ports."""
        addresses = [_addresses(RowErrors.concatenate(port.sums.rows)) for port in ports]
        known_R2 = torch.cat([torch.zeros(0, 2, dtype=torch.long), *addresses])
        known_R2 = known_R2[(known_R2 >= 0).all(1)]
        sizes = (known_R2.amax(0) + 1).tolist() if len(known_R2) else (0, 0)
        is_token_PS = torch.zeros(*sizes, dtype=torch.bool)
        is_token_PS[known_R2[:, 0], known_R2[:, 1]] = True
        numbers_PS = torch.full(is_token_PS.shape, -1)
        numbers_PS[is_token_PS] = torch.arange(int(is_token_PS.sum()))
        return cls(numbers_PS, is_token_PS.nonzero())

    def worst(self, parts: list[RowErrors]) -> Tensor:
        """The largest relative error of each token, (T,); nan is larger, -1 is none at all."""
        rows = RowErrors.concatenate(parts)
        addresses_R2 = _addresses(rows)
        inside = (addresses_R2 >= 0) & (addresses_R2 < torch.tensor(self.numbers_PS.shape))
        known = inside.all(1)
        numbers = torch.full(known.shape, -1)
        numbers[known] = self.numbers_PS[addresses_R2[known, 0], addresses_R2[known, 1]]
        known = numbers >= 0
        worst_T = torch.full(self.addresses_T2.shape[:1], -1.0, dtype=torch.float64)
        return worst_T.scatter_reduce(0, numbers[known], rows.relative()[known].double(), "amax")


def _addresses(rows: RowErrors) -> Tensor:
    """Prompt and position of each row, (R, 2); one is -1 where a row belongs to no token."""
    return torch.stack([rows.prompt.long(), rows.position.long()], dim=1)


@dataclass(slots=True)
class _Worst:
    """The worst port of a stage for each token, all (T,); port is -1 where there is none."""

    ratio: Tensor
    actual: Tensor
    expected: Tensor
    port: Tensor


def _token_rows(
    ports: dict[tuple[str, str], PortResult], noise: ReplayResults, evidence: GenerateEvidence
) -> list[Measurement]:
    tokens = _Tokens.of(ports.values())
    floor = evidence.unit_roundoff / 2
    worst: dict[Stage, _Worst] = {}
    for number, (key, port) in enumerate(ports.items()):
        actual = tokens.worst(port.sums.rows)
        reference = noise.ports.get(key)
        expected = tokens.worst(reference.sums.rows if reference is not None else []).clamp(min=0)
        ratio = torch.where(actual < 0, -1.0, actual / expected.clamp(min=floor))
        known = worst.get(port.stage)
        if known is None:
            nothing = torch.full_like(ratio, -1.0)
            known = worst[port.stage] = _Worst(nothing, actual, expected, nothing.long())
        # Not written as "is larger": nothing is worse than a NaN.
        worse = ~(ratio <= known.ratio) & ~known.ratio.isnan()
        worst[port.stage] = _Worst(
            torch.where(worse, ratio, known.ratio),
            torch.where(worse, actual, known.actual),
            torch.where(worse, expected, known.expected),
            torch.where(worse, number, known.port),
        )
    addresses = [(prompt, position) for prompt, position in tokens.addresses_T2.tolist()]
    steps = [evidence.call_of(evidence.token(*address))[1] for address in addresses]
    places = [_place(port) for port in ports.values()]
    return [
        Measurement(
            **places[port], statistic="token", actual=actual, expected=expected, ratio=ratio,
            prompt=prompt, position=position, step=step,
        )
        for of_stage in worst.values()
        for (prompt, position), step, ratio, actual, expected, port in zip(
            addresses, steps, of_stage.ratio.tolist(), of_stage.actual.tolist(),
            of_stage.expected.tolist(), of_stage.port.tolist(), strict=True,
        )
        if port >= 0
    ]  # fmt: skip


def _place(port: PortResult) -> dict[str, Any]:
    """Columns of a row that say where: the stage, and the port as seen from it."""
    own = port.module == port.stage.module
    return {
        "level": "inputs" if port.stage.phase == "inputs" else "modules",
        "module": port.stage.module,
        "port": port.port if own else f"{port.module}:{port.port}",
        "phase": port.stage.phase,
        "order": port.order,
    }
