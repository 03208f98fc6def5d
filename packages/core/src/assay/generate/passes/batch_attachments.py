"""Tensors of each batch, attached to a trace: tokens, logits, noise-logits, scores.

Each batch is a separate attachment, so that it can be written as soon as it is computed.
"""

from collections.abc import Iterable

from torch import Tensor

from assay.inputs import Batch
from assay.trace import Trace, TraceWriter

_KEY = "values"


def attach_batch(writer: TraceWriter, name: str, number: int, tensor: Tensor) -> None:
    """Store the tensor of batch `number`. Raises: as `TraceWriter.attach`."""
    writer.attach(batch_attachment(name, number), {_KEY: tensor})


def attached_batches(trace: Trace, name: str, batches: Iterable[Batch]) -> list[Tensor]:
    """Return the tensor of each of `batches`, memory-mapped. Raises: as `Trace.attachment`."""
    return [trace.attachment(batch_attachment(name, batch.number))[_KEY] for batch in batches]


def batch_attachment(name: str, number: int) -> str:
    """Return the name of the attachment for batch `number`."""
    return f"{name}.{number}"
