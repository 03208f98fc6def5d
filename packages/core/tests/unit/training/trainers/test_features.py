"""What the features of a plan change in the reference trainer, and that they change it at all.

Shapes: B rows, T positions.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from assay.devices.cpu import CPU
from assay.devices.cuda import NVIDIA
from assay.errors import UsageError
from assay.training import MicroBatch, ReferenceTrainer, training_batches
from assay.training.batches import coder_of, pack_rows, with_first_labels
from assay.training.losses import IGNORED
from assay.training.processes.candidate import count_compiled_graphs
from assay.training.protocol import TrainingPlan
from assay.training.state.files import fingerprint
from assay.training.trainers.reference import backend_of, compile_layers

MODEL = "micro:llama?trained=0"
BATCH = training_batches(coder_of(MODEL), steps=1, micro_batches=2)[0]
SCALE = 2.0**16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def open_trainer(
    *features: str,
    run: str = "cpu/float64",
    model: str = MODEL,
    kind: type[ReferenceTrainer] = ReferenceTrainer,
) -> ReferenceTrainer:
    trainer = kind()
    trainer.setup(
        TrainingPlan(
            model, run, max_grad_norm=math.inf, features=frozenset(features), adapter_dropout=0.0
        )
    )
    return trainer


def gradients(trainer: ReferenceTrainer) -> dict[str, Tensor]:
    named = trainer.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_step_alike(actual: ReferenceTrainer, expected: ReferenceTrainer) -> None:
    """Their first steps have one loss, one norm, and the same gradients.

    Up to float32, in which the norms of transformers compute in runs in float64, too.
    """
    reports = [trainer.step(BATCH) for trainer in (actual, expected)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-6)
    assert reports[0].num_tokens == reports[1].num_tokens
    found, wanted = gradients(actual), gradients(expected)
    assert found.keys() == wanted.keys()
    assert len(wanted) > 30
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


class Noting(ReferenceTrainer):
    """Keeps what `compute_loss` is given."""

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self.given: list[MicroBatch] = []

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        self.given.append(micro_batch)
        return super().compute_loss(micro_batch, num_step_tokens)


# Packed


def test_packed_rows_are_one_row_whose_positions_begin_anew() -> None:
    one = {
        "input_ids": torch.tensor([[1, 2, 0], [3, 4, 5]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "labels": torch.tensor([[1, 2, IGNORED], [IGNORED, 4, 5]]),
    }
    other = {
        "input_ids": torch.tensor([[0, 6, 7]]),
        "attention_mask": torch.tensor([[0, 1, 1]]),
        "labels": torch.tensor([[IGNORED, 6, 7]]),
    }

    packed = pack_rows([one, other])

    assert {name: value.tolist() for name, value in packed.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "labels": [[IGNORED, 2, IGNORED, 4, 5, IGNORED, 7]],
        "position_ids": [[0, 1, 0, 1, 2, 0, 1]],
    }
    assert one["labels"].tolist() == [[1, 2, IGNORED], [IGNORED, 4, 5]]


def test_first_labels_are_those_of_rows_that_begin_in_the_first_column() -> None:
    one = {
        "input_ids": torch.tensor([[1, 2, 0], [0, 4, 5]]),
        "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        "labels": torch.tensor([[IGNORED, 2, IGNORED], [IGNORED, IGNORED, 5]]),
    }

    assert with_first_labels(one)["labels"].tolist() == [[1, 2, IGNORED], [IGNORED, IGNORED, 5]]


# gemma2 and mistral have a window of 32 tokens, and rows of 64.
@pytest.mark.parametrize("recipe", ["llama", "mistral", "gemma2", "mixtral"])
def test_packed_rows_train_as_those_of_padded_micro_batches(recipe: str) -> None:
    model = f"micro:{recipe}?trained=0"
    packed = cast("Noting", open_trainer("packed", model=model, kind=Noting))

    assert_step_alike(packed, open_trainer(model=model))

    (given,) = packed.given
    assert given["input_ids"].shape == (1, sum(int(m["attention_mask"].sum()) for m in BATCH))
    assert max(int(one["attention_mask"].sum(1).max()) for one in BATCH) > 32


def test_packed_rows_do_not_see_each_other_under_eager_attention() -> None:
    packed, plain = open_trainer("packed"), open_trainer()
    for trainer in (packed, plain):
        cast("Any", trainer.model).set_attn_implementation("eager")

    assert_step_alike(packed, plain)


# Compiled


# Dynamo asks tensors for their gradient, of which torch warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_train_as_those_that_are_not() -> None:
    compiled, plain = open_trainer("compile", "packed"), open_trainer()
    before = count_compiled_graphs()

    assert_step_alike(compiled, plain)

    # One for all layers: all have one shape.
    assert count_compiled_graphs() == before + 1


def test_every_layer_is_compiled_under_its_own_name() -> None:
    compiled, plain = open_trainer("compile"), open_trainer()

    layers = [cast("Any", compiled.model.get_submodule(f"model.layers.{n}")) for n in range(4)]
    assert all(layer._compiled_call_impl is not None for layer in layers)
    assert dict(compiled.model.named_modules()).keys() == dict(plain.model.named_modules()).keys()
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
    assert "compiled by aot_eager" in compiled.traits.notes[0]
    assert plain.traits.notes == ()


def test_accelerators_compile_training_as_they_compile_all_else() -> None:
    assert backend_of(CPU) == "aot_eager"
    assert backend_of(NVIDIA) == NVIDIA.compile_backend == "inductor"


def test_model_of_unknown_layers_is_not_compiled_in_silence() -> None:
    with pytest.raises(UsageError, match=r"^Linear names no decoder layers \(_no_split_modules\)"):
        compile_layers(nn.Linear(2, 2), CPU)


# Loss scaling


class Overflowing(ReferenceTrainer):
    """A gradient of its first step overflows."""

    tries = 0

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if not self.tries:
            cast("Any", self.model.get_parameter("lm_head.weight").grad)[0, 0] = torch.inf
        self.tries += 1


class NotingScale(ReferenceTrainer):
    """Keeps gradients as backward leaves them."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        self.scaled = gradients(self)


def test_loss_is_scaled_until_gradients_are_clipped() -> None:
    scaled = cast("NotingScale", open_trainer("loss-scaling", kind=NotingScale))

    # A power of two rounds nothing.
    assert_step_alike(scaled, open_trainer())

    clipped = gradients(scaled)
    assert len(clipped) == 39
    for name, gradient in scaled.scaled.items():
        torch.testing.assert_close(gradient, SCALE * clipped[name], rtol=1e-12, atol=0.0)


def test_step_that_overflows_is_skipped_and_made_at_half_the_scale() -> None:
    trainer = open_trainer("loss-scaling", kind=Overflowing)
    before = fingerprint(trainer.model.state_dict())

    skipped = trainer.step(BATCH)

    assert (skipped.skipped, skipped.step) == (True, 0)
    assert not math.isfinite(skipped.grad_norm)
    assert fingerprint(trainer.model.state_dict()) == before
    assert not trainer.optimizer.state
    assert trainer.scaler.get_scale() == SCALE / 2
    made = trainer.step(BATCH)
    assert (made.skipped, made.step) == (False, 0)
    assert fingerprint(trainer.model.state_dict()) != before
    assert trainer.step(BATCH).step == 1


def test_scale_and_its_growth_are_restored(tmp_path: Path) -> None:
    trainer = open_trainer("loss-scaling", kind=Overflowing)
    for _ in range(3):
        trainer.step(BATCH)
    trainer.save(tmp_path)
    kept = trainer.state_dict()["scaler"]
    assert (kept["scale"], kept["_growth_tracker"]) == (SCALE / 2, 2)

    loaded, injected = open_trainer("loss-scaling"), open_trainer("loss-scaling")
    loaded.load(tmp_path)
    injected.load_state_dict(trainer.state_dict())

    assert loaded.state_dict()["scaler"] == injected.state_dict()["scaler"] == kept


def test_without_the_feature_there_is_no_scale() -> None:
    trainer = open_trainer()
    trainer.step(BATCH)

    assert trainer.scaler.get_scale() == 1
    assert "scaler" not in trainer.state_dict()


# Mixed precision


def outputs_of(trainer: ReferenceTrainer, path: str) -> list[torch.dtype]:
    """The dtypes of what a module returns in one step."""
    found: list[torch.dtype] = []
    note: Callable[..., None] = lambda module, args, output: found.append(output.dtype)  # noqa: E731
    handle = trainer.model.get_submodule(path).register_forward_hook(note)
    trainer.step(BATCH)
    handle.remove()
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_computes_in_the_runs_dtype_and_trains_in_float32(dtype: str) -> None:
    trainer = open_trainer("mixed-precision", run=f"cpu/{dtype}")

    found = outputs_of(trainer, "model.layers.0.mlp.up_proj")

    assert found == [getattr(torch, dtype)] * len(BATCH)
    moments = [value for one in trainer.optimizer.state.values() for value in one.values()]
    values = [*trainer.model.parameters(), *gradients(trainer).values(), *moments]
    assert len(values) == (1 + 1 + 3) * 39
    assert {value.dtype for value in values} == {torch.float32}


def test_mixed_precision_changes_nothing_where_the_run_is_in_float32() -> None:
    mixed = open_trainer("mixed-precision", run="cpu/float32")
    plain = open_trainer(run="cpu/float32")

    assert mixed.step(BATCH) == plain.step(BATCH)
    assert fingerprint(mixed.model.state_dict()) == fingerprint(plain.model.state_dict())


def test_float16_trains_under_mixed_precision_and_loss_scaling() -> None:
    trainer = open_trainer(
        "mixed-precision", "loss-scaling", run="cpu/float16", model="micro:llama"
    )
    plain = open_trainer(run="cpu/float32", model="micro:llama")
    reports = [trainer.step(BATCH) for _ in range(4)]

    made = [report.loss for report in reports if not report.skipped]
    expected = [plain.step(BATCH).loss for _ in made]
    assert len(made) >= 3
    assert made == pytest.approx(expected, rel=0.01)
