"""Rows of measurements.jsonl for single tokens, which the heat map shows.

Shape legend: R rows of a port, S stages, T tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from assay.comparing.results import PortResult
from assay.comparing.wording.deciding_rows import TOKEN_STATISTIC
from assay.metrics import RowErrors
from assay.verdicts import Measurement

if TYPE_CHECKING:
    from assay.stages import Stage


@dataclass(frozen=True, slots=True)
class TokenPort:
    """A port whose tokens get rows."""

    result: PortResult
    noise: list[RowErrors] | None
    """Errors of the noise run. Without a noise run this is None, and `floor` is the noise."""
    floor: float
    """The smallest noise that an error is divided by."""
    place: dict[str, Any]
    """Columns of the rows that say where: level, module, port, phase, order."""


def list_token_rows(
    ports: Sequence[TokenPort], step_of: Callable[[int, int], int], max_rows: int | None = None
) -> list[Measurement]:
    """Return for every stage and token the row of its worst port.

    step_of: from prompt and position to the forward pass.
    max_rows: keep the tokens with the highest ratios, each in all stages.
    """
    tokens = _Tokens.of(port.result for port in ports)
    worst: dict[Stage, _Worst] = {}
    for number, port in enumerate(ports):
        actual = tokens.worst(port.result.sums.rows)
        expected = torch.full_like(actual, port.floor)
        if port.noise is not None:
            expected = tokens.worst(port.noise).clamp(min=0)
        ratio = torch.where(actual < 0, -1.0, actual / expected.clamp(min=port.floor))
        stage = port.result.stage
        known = worst.get(stage)
        if known is None:
            nothing = torch.full_like(ratio, -1.0)
            known = worst[stage] = _Worst(nothing, actual, expected, nothing.long())
        # Not written as "is larger": nothing is worse than a NaN.
        worse = ~(ratio <= known.ratio) & ~known.ratio.isnan()
        worst[stage] = _Worst(
            torch.where(worse, ratio, known.ratio),
            torch.where(worse, actual, known.actual),
            torch.where(worse, expected, known.expected),
            torch.where(worse, number, known.port),
        )
    addresses = [(prompt, position) for prompt, position in tokens.addresses_T2.tolist()]
    steps = [step_of(*address) for address in addresses]
    kept = list(range(len(addresses)))
    if max_rows is not None and len(worst) * len(kept) > max_rows:
        severest_T = (
            torch.stack([one.ratio for one in worst.values()]).nan_to_num(torch.inf).amax(0)
        )
        kept = sorted(severest_T.argsort(descending=True)[: max_rows // len(worst)].tolist())
    return [
        Measurement(
            **ports[port].place, statistic=TOKEN_STATISTIC, actual=actual, expected=expected,
            ratio=ratio, prompt=addresses[token][0], position=addresses[token][1],
            step=steps[token],
        )
        for one in worst.values()
        for token, ratio, actual, expected, port in zip(
            kept, *(values[kept].tolist() for values in (one.ratio, one.actual, one.expected, one.port)),
            strict=True,
        )
        if port >= 0
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
        """Return the largest relative error of each token, (T,): nan before any number, -1 without a row."""
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
    """The worst port of a stage for each token, all (T,); the port of a token without rows is -1."""

    ratio: Tensor
    actual: Tensor
    expected: Tensor
    port: Tensor
