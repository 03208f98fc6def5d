"""Tensors of each batch, attached to a trace: tokens, logits, noise-logits, scores.

Each batch is a separate attachment, so that it can be written as soon as it is computed.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from assay.inputs import Batch
from assay.trace import Trace, TraceWriter

_KEY = "values"


def attach_batch(writer: TraceWriter, name: str, number: int, tensor: Tensor) -> None:
    """Store the tensor of batch `number`. Raises: as `TraceWriter.attach`."""
    writer.attach(_attachment(name, number), {_KEY: tensor})


def attached_batches(trace: Trace, name: str, batches: Iterable[Batch]) -> list[Tensor]:
    """Return the tensor of each of `batches`, memory-mapped. Raises: as `Trace.attachment`."""
    return [trace.attachment(_attachment(name, batch.number))[_KEY] for batch in batches]


def attach_batch_tensors(
    writer: TraceWriter, name: str, number: int, tensors: Mapping[str, Tensor]
) -> None:
    """Store several named tensors of batch `number`. Raises: as `TraceWriter.attach`."""
    writer.attach(_attachment(name, number), tensors)


def attached_batch_tensors(trace: Trace, name: str, number: int) -> Mapping[str, Tensor]:
    """Return the tensors that `attach_batch_tensors` stored, if any."""
    attachment = _attachment(name, number)
    return trace.attachment(attachment) if attachment in trace.attachments else {}


def _attachment(name: str, number: int) -> str:
    return f"{name}.{number}"
