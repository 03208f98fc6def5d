"""Custom metrics, given as `--metric FILE.py:FUNC`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from assay.errors import UsageError, raised_in_words
from assay.output.tables import Cell
from assay.plugins import find_plugin_file, load_object


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
