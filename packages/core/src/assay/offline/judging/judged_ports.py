"""One port with its ratios, and the passes in which it differs."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from assay.comparing.results import PortResult
from assay.metrics import RowErrors
from assay.noise import at_least
from assay.offline.pairing.port_series import Port
from assay.statistics import SYSTEMATIC
from assay.verdicts import Ratio

# Share of the limit from which a port counts as wrong in the first wrong pass: 1.75 times the noise of the same
# pass, as the limit is 3.5.
_CARRIED = 0.5


@dataclass(frozen=True, eq=False)
class JudgedPort:
    """One port with its judged ratios."""

    port: Port
    order: int
    result: PortResult
    ratios: tuple[Ratio, ...]
    expected_noise: float = 0.0
    """Expected relative error, used without a noise run."""
    noise: PortResult | None = None
    """The measurement of the noise run."""

    @property
    def worst(self) -> Ratio:
        """Return the ratio furthest over its limit, or nearest to it."""
        return max(self.ratios, key=lambda item: item.severity)

    @property
    def call(self) -> tuple[str, str, int, int]:
        """Return what the inputs and outputs of a module share: module, phase, rank and step."""
        return self.port.module, self.port.phase, self.result.rank, self.result.step

    @property
    def is_blind(self) -> bool:
        """Return True if the expected noise is so large that a tensor of zeros would agree.

        Equal values agree without noise.
        """
        if self.result.sums.num_elements and not self.result.sums.dd:
            return False
        inexact = [item for item in self.ratios if item.expected]
        return bool(inexact) and all(item.resolution >= 1 for item in inexact)

    @property
    def agrees(self) -> bool:
        """Return True if no ratio is over its limit."""
        return not any(item.failed for item in self.ratios)

    @cached_property
    def first_bad_row(self) -> int | None:
        """Return the number of the first row over the limit, or else of the worst of the first wrong pass."""
        relative = RowErrors.concatenate(self.result.sums.rows).relative().nan_to_num(math.inf)
        if not len(relative):
            return None
        if self.worst.statistic not in SYSTEMATIC:
            bad = (relative > self.worst.limit * self.worst.expected).nonzero()
            if len(bad):
                return int(bad[0, 0])
        ends = list(accumulate(number for _, number in self.result.passes))
        of_pass = (
            range(end - number, end)
            for (at, number), end in zip(self.result.passes, ends, strict=True)
            if at == self.first_bad_pass and number
        )
        rows = next(of_pass, range(len(relative)))
        return rows.start + int(relative[rows.start : rows.stop].argmax())

    @cached_property
    def _severities(self) -> dict[tuple[int, int], float]:
        """Return how far each pass is over the limit, by batch and step: above 1 it is wrong.

        A pass has at least the noise of all passes. Without rows and exact values, no pass is known.
        """
        limits = {item.statistic: item for item in self.ratios}
        of_port, of_row = limits.get("accumulated"), limits.get("replay-row")
        of_noise = dict(_rows_by_pass(self.noise)) if self.noise else {}
        found = {}
        for at, rows in _rows_by_pass(self.result):
            severity = 0.0
            if of_port:
                known = _pooled_error(of_noise[at]) if at in of_noise else 0.0
                error, noise = _pooled_error(rows), at_least(of_port.expected, known)
                severity = replace(of_port, actual=error, expected=noise).severity
            if of_row:
                worst = float(rows.relative().nan_to_num(math.inf).max())
                severity = max(severity, replace(of_row, actual=worst).severity)
            found[at] = severity
        if self.result.first_different is not None:
            found[self.result.first_different] = math.inf
        return found

    @cached_property
    def first_bad_pass(self) -> tuple[int, int] | None:
        """Return batch and step of the first pass that is over a limit; None if no single pass is."""
        return min((at for at, severity in self._severities.items() if severity > 1), default=None)

    def differs_by(self, at: tuple[int, int]) -> bool:
        """Return True if this differs in a pass up to `at`, or if only all passes together show it.

        A later module may amplify an error, and exceed its limit in an earlier pass.
        """
        if self.agrees:
            return False
        if self.first_bad_pass is None:
            return True
        return any(known <= at and value > _CARRIED for known, value in self._severities.items())


def _rows_by_pass(result: PortResult) -> Iterator[tuple[tuple[int, int], RowErrors]]:
    """Yield batch and step of each pass that has rows, with its rows."""
    rows = RowErrors.concatenate(result.sums.rows)
    start = 0
    for at, number in result.passes:
        if 0 < number <= len(rows.error) - start:
            chosen = slice(start, start + number)
            yield at, RowErrors(*(getattr(rows, name)[chosen] for name in RowErrors.__slots__))
        start += number


def _pooled_error(rows: RowErrors) -> float:
    """Return the relative error of all rows together; inf or nan if it is not finite."""
    error = float(rows.error.norm())
    return error / float(rows.expected.norm().clamp_min(sys.float_info.min)) if error else 0.0
