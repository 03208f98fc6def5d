"""Rows of measurements.jsonl for single tokens, which the heat map shows.

Shape legend: R rows of a port, S stages, T tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from assay.comparing.results import PortResult
from assay.comparing.wording.deciding_rows import TOKEN_STATISTIC
from assay.metrics import RowErrors
from assay.verdicts import Measurement

if TYPE_CHECKING:
    from assay.stages import Stage


# About 11 MB of measurements.jsonl, and 60 MB of memory in the report.
MAX_TOKEN_ROWS = 40_000


@dataclass(frozen=True, slots=True)
class TokenPort:
    """A port whose tokens get rows."""

    result: PortResult
    noise: list[RowErrors] | None
    """Errors of the noise run; None if there was none. `floor` then takes its place."""
    floor: float
    """The smallest noise that an error is divided by."""
    place: dict[str, Any]
    """Columns that locate the rows: level, module, port, phase, order."""


@dataclass(frozen=True)
class TokenRows(Iterable[Measurement]):
    """The row of the worst port for every stage and token, computed during iteration."""

    ports: Sequence[TokenPort]
    step_of: Callable[[int, int], int]
    """Map prompt and position to the number of the forward pass."""
    max_rows: int = MAX_TOKEN_ROWS
    """With more, only some tokens are kept, each in all stages: of neighboring tokens the one with the
    highest ratio in any stage, and the worst tokens of the worst stages."""

    @cached_property
    def kept(self) -> list[tuple[int, tuple[int, int]]]:
        """Return number, prompt and position of the tokens that are kept."""
        addresses_T2 = self._tokens.addresses_T2
        numbers = list(range(len(addresses_T2)))
        if self.is_bounded:
            numbers = self._worst_of_neighbors(max(1, self.max_rows // len(self._stages)))
        return [(number, tuple(addresses_T2[number].tolist())) for number in numbers]

    @property
    def is_bounded(self) -> bool:
        """Return True if tokens are left out."""
        return len(self._stages) * len(self._tokens.addresses_T2) > self.max_rows

    def _worst_of_neighbors(self, most: int) -> list[int]:
        """Return the numbers of about `most` tokens, in order."""
        num_tokens = len(self._tokens.addresses_T2)
        severest_T = torch.full((num_tokens,), -math.inf, dtype=torch.float64)
        of_stages = []
        for ports in self._stages:
            ratio_T = self._find_worst(ports).ratio.nan_to_num(math.inf)
            severest_T = torch.maximum(severest_T, ratio_T)
            value, number = ratio_T.max(0)
            of_stages.append((float(value), int(number)))
        kept = {number for _, number in sorted(of_stages, reverse=True)[: most // 4]}
        width = -(-num_tokens // max(1, most - len(kept)))
        for start in range(0, num_tokens, width):
            kept.add(start + int(severest_T[start : start + width].argmax()))
        return sorted(kept)

    def __iter__(self) -> Iterator[Measurement]:
        """Yield the rows of one stage after the other."""
        numbers = [number for number, _ in self.kept]
        steps = [self.step_of(*address) for _, address in self.kept]
        for ports in self._stages:
            worst = self._find_worst(ports)
            columns = (worst.ratio, worst.actual, worst.expected, worst.port)
            of_kept = (one[numbers].tolist() for one in columns)
            rows = zip(self.kept, steps, *of_kept, strict=True)
            for (_, (prompt, position)), step, ratio, actual, expected, port in rows:
                if port >= 0:
                    yield Measurement(
                        **self.ports[port].place, statistic=TOKEN_STATISTIC, actual=actual,
                        expected=expected, ratio=ratio, prompt=prompt, position=position,
                        step=step,
                    )  # fmt: skip

    @cached_property
    def _tokens(self) -> "_Tokens":
        return _Tokens.of(port.result for port in self.ports)

    @cached_property
    def _stages(self) -> list[list[int]]:
        """Return the numbers of the ports of each stage."""
        stages: dict[Stage, list[int]] = {}
        for number, port in enumerate(self.ports):
            stages.setdefault(port.result.stage, []).append(number)
        return list(stages.values())

    def _find_worst(self, numbers: Sequence[int]) -> "_Worst":
        """Return the worst of some ports for each token."""
        nothing_T = torch.full((len(self._tokens.addresses_T2),), -1.0, dtype=torch.float64)
        worst = _Worst(nothing_T, nothing_T, nothing_T, nothing_T.long())
        for number in numbers:
            port = self.ports[number]
            actual = self._tokens.worst(port.result.sums.rows)
            expected = torch.full_like(actual, port.floor)
            if port.noise is not None:
                expected = self._tokens.worst(port.noise).clamp(min=0)
            ratio = torch.where(actual < 0, -1.0, actual / expected.clamp(min=port.floor))
            # Written so that a NaN counts as the worst.
            worse = ~(ratio <= worst.ratio) & ~worst.ratio.isnan()
            worst = _Worst(
                torch.where(worse, ratio, worst.ratio),
                torch.where(worse, actual, worst.actual),
                torch.where(worse, expected, worst.expected),
                torch.where(worse, number, worst.port),
            )
        return worst


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens, numbered in the order of prompt and position."""

    numbers_PS: Tensor
    """Numbers by prompt and position; -1 without a token."""
    addresses_T2: Tensor
    """Prompt and position of each token."""

    @classmethod
    def of(cls, ports: Iterable[PortResult]) -> Self:
        """Collect all tokens of these ports."""
        is_token_PS = torch.zeros(0, 0, dtype=torch.bool)
        for port in ports:
            for rows in port.sums.rows:
                known_R2 = _addresses(rows)
                known_R2 = known_R2[(known_R2 >= 0).all(1)]
                if len(known_R2):
                    is_token_PS = _grow(is_token_PS, (known_R2.amax(0) + 1).tolist())
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


def _grow(table: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `table`, padded with False to at least these sizes."""
    missing = [max(0, size - known) for size, known in zip(sizes, table.shape, strict=True)]
    return torch.nn.functional.pad(table, (0, missing[1], 0, missing[0])) if any(missing) else table


def _addresses(rows: RowErrors) -> Tensor:
    """Return prompt and position of each row, (R, 2); a row without a token has a -1."""
    return torch.stack([rows.prompt.long(), rows.position.long()], dim=1)


@dataclass(slots=True)
class _Worst:
    """The worst port of a stage for each token, all (T,); the port of a token without rows is -1."""

    ratio: Tensor
    actual: Tensor
    expected: Tensor
    port: Tensor
