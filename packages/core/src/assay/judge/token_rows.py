"""Rows of measurements.jsonl for single tokens, which the heat map shows.

Shape legend: R rows, P ports, S stages, T tokens; in `numbers_PS`, P prompts and S positions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from assay.judge.results import PortResult
from assay.metrics import RowErrors
from assay.statistics import TOKEN_STATISTIC
from assay.verdicts import Measurement

if TYPE_CHECKING:
    from assay.stages import Stage


# About 11 MB of measurements.jsonl, and 60 MB of memory in the report.
MAX_TOKEN_ROWS = 40_000
# Values of a column that are computed at once: large enough for torch, small enough for the caches.
_BLOCK_VALUES = 1 << 15


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
    def kept(self) -> list[int]:
        """Return the numbers of the tokens that are kept."""
        if self.is_bounded:
            return self._worst_of_neighbors(max(1, self.max_rows // len(self._stages)))
        return list(range(len(self._tokens.addresses_T2)))

    @property
    def is_bounded(self) -> bool:
        """Return True if tokens are left out."""
        return len(self._stages) * len(self._tokens.addresses_T2) > self.max_rows

    def _worst_of_neighbors(self, most: int) -> list[int]:
        """Return the numbers of about `most` tokens, in order."""
        num_tokens = len(self._tokens.addresses_T2)
        severest_T = torch.full((num_tokens,), -math.inf, dtype=torch.float64)
        of_stages: list[tuple[float, int]] = []
        for stages in self._blocks:
            ratio_ST = self._find_worst(stages).ratio.nan_to_num(math.inf)
            severest_T = torch.maximum(severest_T, ratio_ST.amax(0))
            values, numbers = ratio_ST.max(1)
            of_stages += zip(values.tolist(), numbers.tolist(), strict=True)
        kept = {number for _, number in sorted(of_stages, reverse=True)[: most // 4]}
        width = -(-num_tokens // max(1, most - len(kept)))
        for start in range(0, num_tokens, width):
            kept.add(start + int(severest_T[start : start + width].argmax()))
        return sorted(kept)

    def __iter__(self) -> Iterator[Measurement]:
        """Yield the rows of one stage after the other."""
        addresses = self._tokens.addresses_T2[self.kept].tolist()
        tokens = [(*address, self.step_of(*address)) for address in addresses]
        for stages in self._blocks:
            columns = (one[:, self.kept].flatten().tolist() for one in self._find_worst(stages))
            rows = zip(tokens * len(stages), *columns, strict=True)
            for (prompt, position, step), ratio, actual, expected, port in rows:
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

    @property
    def _blocks(self) -> Iterator[list[list[int]]]:
        """Yield consecutive stages, so many that a column of a block has about `_BLOCK_VALUES`."""
        size = max(1, _BLOCK_VALUES // max(1, len(self._tokens.addresses_T2)))
        for start in range(0, len(self._stages), size):
            yield self._stages[start : start + size]

    def _find_worst(self, stages: Sequence[Sequence[int]]) -> "_Worst":
        """Find the worst port of each stage for each token: the first with the largest ratio."""
        numbers = [number for stage in stages for number in stage]
        stage_P = torch.tensor([at for at, stage in enumerate(stages) for _ in stage])
        actual_PT, expected_PT, ratio_PT = self._errors_of([self.ports[one] for one in numbers])
        ratio_ST, at_ST = _largest_of_groups(ratio_PT, stage_P, len(stages))
        return _Worst(
            ratio_ST,
            actual_PT.gather(0, at_ST),
            expected_PT.gather(0, at_ST),
            torch.where(ratio_ST < 0, -1, torch.tensor(numbers)[at_ST]),
        )

    def _errors_of(self, ports: Sequence[TokenPort]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the errors of candidate and noise run and their ratio, each (P, T); -1 without a row."""
        floor_P1 = torch.tensor([[port.floor] for port in ports], dtype=torch.float64)
        has_noise_P1 = torch.tensor([[port.noise is not None] for port in ports])
        actual_PT = self._tokens.worst([port.result.sums.rows for port in ports])
        noise_PT = self._tokens.worst([port.noise or [] for port in ports]).clamp(min=0)
        expected_PT = torch.where(has_noise_P1, noise_PT, floor_P1)
        ratio_PT = actual_PT / torch.maximum(expected_PT, floor_P1)
        return actual_PT, expected_PT, torch.where(actual_PT < 0, -1.0, ratio_PT)


class _Worst(NamedTuple):
    """The worst port of each stage for each token; each field has the shape (S, T)."""

    ratio: Tensor
    """-1 without a row."""
    actual: Tensor
    expected: Tensor
    number: Tensor
    """Number of the port; -1 without a row."""


def _largest_of_groups(
    values_PT: Tensor, group_P: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Return the largest value of each group, and the first row with it, each (groups, T).

    NaN is the largest. No value is below -1.
    """
    size, width = values_PT.shape
    group_PT = group_P[:, None].expand(size, width)
    largest = torch.full((num_groups, width), -1.0, dtype=values_PT.dtype)
    largest = largest.scatter_reduce(0, group_PT, values_PT, "amax")
    is_largest_PT = (values_PT == largest[group_P]) | values_PT.isnan()
    row_PT = torch.where(is_largest_PT, torch.arange(size)[:, None], size)
    first = torch.full((num_groups, width), size).scatter_reduce(0, group_PT, row_PT, "amin")
    return largest, first


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens, numbered in the order of prompt and position."""

    numbers_PS: Tensor
    """Numbers by prompt and position; -1 without a token, as in the last row and column."""
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
        numbers_PS = torch.full([size + 1 for size in is_token_PS.shape], -1)
        numbers_PS[:-1, :-1][is_token_PS] = torch.arange(int(is_token_PS.sum()))
        return cls(numbers_PS, is_token_PS.nonzero())

    def worst(self, ports: Sequence[list[RowErrors]]) -> Tensor:
        """Return the largest relative error of each token at each port, (P, T).

        It is nan before any number, and -1 without a row.
        """
        rows = RowErrors.concatenate([part for parts in ports for part in parts])
        sizes_P = torch.tensor([sum(len(part.prompt) for part in parts) for parts in ports])
        port_R = torch.repeat_interleave(torch.arange(len(ports)), sizes_P)
        prompt, position = (
            column.clamp(-1, size - 1)
            for column, size in zip(_addresses(rows).T, self.numbers_PS.shape, strict=True)
        )
        numbers = self.numbers_PS[prompt, position]
        known = numbers >= 0
        num_tokens = len(self.addresses_T2)
        at = port_R[known] * num_tokens + numbers[known]
        worst = torch.full((len(ports) * num_tokens,), -1.0, dtype=torch.float64)
        worst = worst.scatter_reduce(0, at, rows.relative()[known].double(), "amax")
        return worst.view(len(ports), num_tokens)


def _grow(table: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `table`, padded with False to at least these sizes."""
    missing = [max(0, size - known) for size, known in zip(sizes, table.shape, strict=True)]
    return torch.nn.functional.pad(table, (0, missing[1], 0, missing[0])) if any(missing) else table


def _addresses(rows: RowErrors) -> Tensor:
    """Return prompt and position of each row, (R, 2); a row without a token has a -1."""
    return torch.stack([rows.prompt.long(), rows.position.long()], dim=1)
