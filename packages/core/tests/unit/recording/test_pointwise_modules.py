import torch

from assay.recording.pointwise_modules import PointwiseModules
from packages.core.tests.unit.recording.gated import Gated, watching


def test_modules_whose_own_code_only_rounds_are_pointwise() -> None:
    model = Gated()
    with watching(model) as tracer, PointwiseModules(tracer) as pointwise:
        model(torch.ones(2, 4))

    # The root's own code multiplies; sums are made by its children.
    assert pointwise.paths == {"", "act"}
