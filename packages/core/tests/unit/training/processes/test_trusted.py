import math

import pytest
import torch
from torch import nn

from assay.training.check import options_for
from assay.training.processes.requests import TrainOptions
from assay.training.processes.trusted import trusted_trainer


def scale_of(features: tuple[str, ...]) -> float:
    """By which the yardstick for a candidate in bfloat16 multiplies embeddings of 96 features."""
    options = options_for(TrainOptions(model="micro:gemma2"), {}, features)
    trainer = trusted_trainer(options, "bfloat16", "float64")
    trainer.setup(options.plan("cpu/float64"))
    scale = trainer.model.get_buffer("model.embed_tokens.embed_scale")
    return float(scale)


def test_buffers_of_the_yardstick_are_the_candidates() -> None:
    assert scale_of(()) == float(torch.tensor(math.sqrt(96)).bfloat16())
    assert scale_of(("mixed-precision",)) == pytest.approx(math.sqrt(96), rel=1e-7)


@pytest.mark.parametrize(
    ("features", "expected"), [((), torch.float32), (("mixed-precision",), torch.bfloat16)]
)
def test_adapters_of_the_noise_run_compute_as_the_candidates(
    features: tuple[str, ...], expected: torch.dtype
) -> None:
    options = options_for(TrainOptions(model="micro:llama", lora=True), {}, features)
    trainer = trusted_trainer(options, "bfloat16", None)
    trainer.setup(options.plan("cpu/bfloat16"))
    adapter = trainer.model.get_submodule(
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.default"
    )
    assert isinstance(adapter, nn.Linear)
    with trainer.computing():
        output = adapter(torch.ones(1, adapter.in_features))

    assert (adapter.weight.dtype, output.dtype) == (torch.float32, expected)
