"""AdamW in float32, measured against a golden that was recorded in float64."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from assay.hooks.tensors import Boundary
from assay.stages import Stage
from assay.trace import TraceWriter
from assay.training.check import options_for
from assay.training.processes.reference import measure_in_float32, trusted_trainer
from assay.training.replay.parameter_watch import observe_update
from assay.training.replay.step_values import TRACE, RunRows, StageRecorder, ValueAddress
from assay.training.reports import TrainOptions
from assay.training.state.files import state_file, write_state
from assay.training.state.parameters import NamedParameter

BOUNDARY = Boundary.exact_inputs_for(torch.bfloat16)
OPTIONS = TrainOptions(model="micro:llama", steps=2, resume_at=1, learning_rate=1e-2)
UNIT = 2.0**-24


def rounded(value: Tensor) -> Tensor:
    return value.bfloat16().to(value.dtype)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Two steps of one weight by AdamW in float64, each from a state that bfloat16 can hold."""
    torch.manual_seed(0)
    weight = nn.Parameter(rounded(torch.randn(8, 16, dtype=torch.float64)))
    item = NamedParameter("norm.weight", "norm", "", weight)
    optimizer = torch.optim.AdamW([weight], lr=OPTIONS.learning_rate)
    with TraceWriter(tmp_path / TRACE, {}) as writer:
        handler = StageRecorder(writer, BOUNDARY)
        for step in range(OPTIONS.steps):
            moments = {
                name: value if value.ndim == 0 else rounded(value)
                for name, value in optimizer.state[weight].items()
            }
            state = {"model": {"norm.weight": weight.detach()}, "trainable": ["norm.weight"]}
            kept = {"norm.weight": moments} if moments else {}
            write_state(state_file(tmp_path, step), state | {"moments": kept, "generators": {}})
            optimizer.state[weight].update(moments)
            handler.begin_step(step)
            address = ValueAddress(Stage("norm", "clip"), "gradient.weight")
            weight.grad = handler.observe(address, torch.randn(8, 16, dtype=torch.float64))
            before = weight.detach().clone()
            optimizer.step()
            observe_update(handler, item, weight.detach() - before, optimizer.state[weight])
            handler.end_step()
            weight.data = rounded(weight.data)
    return tmp_path


def test_step_in_float32_is_off_by_the_rounding_of_float32(golden: Path) -> None:
    rows = RunRows.of_counts([[2], [2]])

    results = measure_in_float32(golden, OPTIONS, rows, "bfloat16")

    errors = {port: result.sums.relative_error for (_, port), result in results.ports.items()}
    assert errors.keys() == {
        "update.weight", "exp_avg.weight", "exp_avg_sq.weight", "count-step.weight"
    }  # fmt: skip
    assert errors["exp_avg.weight"] < 4 * UNIT
    assert errors["exp_avg_sq.weight"] < 4 * UNIT
    # An update of about 0.01 is a difference of weights of about 1: a hundred times their rounding.
    assert UNIT < errors["update.weight"] < 400 * UNIT
    assert results.ports["norm", "count-step.weight"].exact.num_different == 0
    assert {result.dtype for result in results.ports.values()} >= {"float32"}


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
