"""Names, files and batches of the golden of a training check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.trace import Trace
from assay.training.batches import MicroBatch, check_batch, coder_of, training_batches
from assay.training.processes.requests import TrainOptions

NOISE = "noise"
# In the noise run's trace: modules whose own code only rounded element by element; buffers and frozen
# parameters of the reference's model.
POINTWISE, UNTRAINED = "pointwise", "untrained"

Batches = Sequence[Sequence[MicroBatch]]


def plan_batches(options: TrainOptions) -> Batches:
    """Plan the batches of both sides. Raises: UsageError if a step has no label token."""
    batches = training_batches(
        coder_of(options.model, options.remote_code),
        steps=options.steps,
        micro_batches=options.micro_batches,
        shapes=options.shapes,
        seed=options.seed,
    )
    for batch in batches:
        check_batch(batch)
    return batches


def read_names(golden: Path, kind: str) -> frozenset[str]:
    """Read the modules POINTWISE, or the buffers and frozen parameters UNTRAINED."""
    names: Any = Trace.open(golden / NOISE).attachment_json(kind)
    return frozenset(names)
