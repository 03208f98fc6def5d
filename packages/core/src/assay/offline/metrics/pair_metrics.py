"""Measurement of every pair by published and custom metrics."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from assay.dumps.protocol import DumpedTensor
from assay.errors import UsageError, raised_in_words
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


# Values of metrics by port and rank.
MetricValues = Mapping[tuple[Port, int], Mapping[Statistic, float]]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors at one port of the expected dump."""

    port: Port
    expected: DumpedTensor
    actual: DumpedTensor
    values: tuple[Tensor, Tensor] | None = None
    """Compared rows of actual and expected, (R, C); None for masks and pairs that were not compared."""
    reason: str = ""
    """The reason why the pair was not compared; "" if it was."""
    metrics: PairMetrics | None = None
    """None if the pair was not compared, or if no metrics are wanted."""
    custom: Sequence[tuple[Cell, str]] = ()
    """Value and message of each custom metric."""


def measure_pair(
    measure: MeasurePair, custom: Sequence[CustomMetric], pair: TensorPair
) -> TensorPair:
    """Return a pair with its metrics, without its values."""
    if pair.values is None:
        return pair
    actual, expected = pair.values
    where = f"{pair.port} at step {pair.expected.site.at.step}"
    found = [one.measure(expected, actual, where) for one in custom]
    return replace(pair, values=None, metrics=measure(expected, actual), custom=found)


def find_worst_values(pairs: Iterable[TensorPair]) -> MetricValues:
    """Return the worst value of each metric with a limit, by port and actual rank.

    Undefined metrics, as of an empty tensor, are left out.
    """
    worst = defaultdict[tuple[Port, int], dict[Statistic, float]](dict)
    for one in pairs:
        if one.metrics is None:
            continue
        values: dict[Statistic, float] = {"cosine-distance": 1 - one.metrics.cosine_similarity}
        if one.port.level == "logits":
            values["kl-divergence"] = one.metrics.kl_divergence
        known = worst[one.port, one.actual.site.at.rank]
        for name, value in values.items():
            if not math.isnan(value):
                known[name] = max(value, known.get(name, value))
    return worst
