"""Measurement of every pair by published and custom metrics."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor

from assay.errors import UsageError, raised_in_words
from assay.offline.judging.locating import MetricValues, level_of
from assay.offline.measuring.measured import TensorPair
from assay.offline.metrics.published import MeasurePair, PairMetrics
from assay.offline.ports.lanes import Port
from assay.output.tables import Cell
from assay.plugins import find_plugin_file, load_object
from assay.statistics import Statistic


@dataclass(frozen=True, slots=True)
class CustomMetric:
    """A function `(golden, my) -> (value, message)`."""

    reference: str
    """FILE.py:FUNC."""
    name: str
    function: Callable[[Tensor, Tensor], object]

    def measure(self, expected: Tensor, actual: Tensor, where: str) -> tuple[Cell, str]:
        """Call the function with flat float32 copies of two tensors.

        where: the port, for messages.
        Raises: UsageError if the function fails.
        """
        golden, my = (one.reshape(-1).to(torch.float32, copy=True) for one in (expected, actual))
        try:
            found = self.function(golden, my)
        except (Exception, SystemExit) as error:
            what = f"raised for {where}: {raised_in_words(error)}"
            raise UsageError(f"--metric {self.reference} {what}") from error
        match found:
            case (Tensor() as value, str() as message) if value.numel() == 1:
                return float(value), message
            case ((Real() | str()) as value, str() as message):
                return value if isinstance(value, str) else float(value), message
        raise UsageError(
            f"--metric {self.reference} returned {found!r:.200} for {where};"
            " it must return a number or a text, and a message"
        )


def load_metrics(references: Sequence[str], taken: Collection[str]) -> list[CustomMetric]:
    """Import the functions of all --metric options.

    taken: names of other columns.
    Raises: UsageError if the import fails, UsageError if a column has the same name.
    """
    metrics: dict[str, CustomMetric] = {}
    for reference in references:
        _, name = find_plugin_file(reference)
        if name in taken or name in metrics:
            raise UsageError(f"--metric {reference}: there is a column {name}; rename the function")
        metrics[name] = CustomMetric(reference, name, load_object(reference))
    return list(metrics.values())


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The metrics of a pair."""

    pair: TensorPair
    """The pair, without its values."""
    metrics: PairMetrics | None = None
    """None if the pair was not compared."""
    custom: Sequence[tuple[Cell, str]] = ()
    """Value and message of each custom metric."""


@dataclass
class MetricObserver:
    """Keeps the metrics of every pair."""

    measure: MeasurePair
    custom: Sequence[CustomMetric] = ()
    pairs: list[MeasuredPair] = field(default_factory=list)

    def __call__(self, pair: TensorPair) -> None:
        """Measure one pair."""
        if pair.values is None:
            self.pairs.append(MeasuredPair(pair))
            return
        actual, expected = pair.values
        where = f"{pair.port} at step {pair.expected.site.at.step}"
        custom = [one.measure(expected, actual, where) for one in self.custom]
        metrics = self.measure(expected, actual)
        self.pairs.append(MeasuredPair(replace(pair, values=None), metrics, custom))

    def renew(self) -> "MetricObserver":
        """Return an empty observer with the same metrics."""
        return MetricObserver(self.measure, self.custom)

    def extend(self, later: "MetricObserver") -> None:
        """Add the results of an observer of later pairs."""
        self.pairs += later.pairs

    def worst_values(self) -> MetricValues:
        """Return the worst value of each metric with a limit, by port and actual rank.

        Undefined metrics, as of an empty tensor, are left out.
        """
        worst = defaultdict[tuple[Port, int], dict[Statistic, float]](dict)
        for one in self.pairs:
            if one.metrics is None:
                continue
            values: dict[Statistic, float] = {"cosine-distance": 1 - one.metrics.cosine_similarity}
            if level_of(one.pair.port) == "logits":
                values["kl-divergence"] = one.metrics.kl_divergence
            known = worst[one.pair.port, one.pair.actual.site.at.rank]
            for name, value in values.items():
                if not math.isnan(value):
                    known[name] = max(value, known.get(name, value))
        return worst
