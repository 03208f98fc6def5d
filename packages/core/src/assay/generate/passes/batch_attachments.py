"""Tensors of each batch beside the calls of a trace: tokens, logits, noise-logits, scores.

Every batch is an attachment of its own, so that none waits in memory for the others.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from assay.inputs import Batch
from assay.trace import Trace, TraceWriter

_KEY = "values"


def attach_batch(writer: TraceWriter, name: str, number: int, tensor: Tensor) -> None:
    """Store what batch `number` gave. Raises: as `TraceWriter.attach`."""
    writer.attach(_attachment(name, number), {_KEY: tensor})


def attached_batches(trace: Trace, name: str, batches: Iterable[Batch]) -> list[Tensor]:
    """What is stored for each of `batches`, memory-mapped. Raises: as `Trace.attachment`."""
    return [trace.attachment(_attachment(name, batch.number))[_KEY] for batch in batches]


def attach_batch_tensors(
    writer: TraceWriter, name: str, number: int, tensors: Mapping[str, Tensor]
) -> None:
    """Store several named tensors of batch `number`. Raises: as `TraceWriter.attach`."""
    writer.attach(_attachment(name, number), tensors)


def attached_batch_tensors(trace: Trace, name: str, number: int) -> Mapping[str, Tensor]:
    """What `attach_batch_tensors` stored; empty if nothing was."""
    attachment = _attachment(name, number)
    return trace.attachment(attachment) if attachment in trace.attachments else {}


def _attachment(name: str, number: int) -> str:
    return f"{name}.{number}"
