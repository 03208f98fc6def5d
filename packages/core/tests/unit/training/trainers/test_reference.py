"""The reference trainer on an untrained model, in float64 where numbers are compared.

Shapes: B rows, T positions, V vocabulary."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from assay.errors import UsageError
from assay.training import MicroBatch, ReferenceTrainer, training_batches
from assay.training.batches import coder_of
from assay.training.losses import IGNORED
from assay.training.protocol import Trainer, TrainingPlan
from assay.training.state.files import fingerprint
from assay.training.trainers.reference import require_no_dropout

SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
}


def test_only_dropout_that_is_drawn_is_refused() -> None:
    none: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0}

    require_no_dropout(LlamaForCausalLM(LlamaConfig(**SMALL)), "train without")
    # Of the head of a classifier, which a causal model has not.
    require_no_dropout(GPT2LMHeadModel(GPT2Config(**SMALL, **none, resid_pdrop=0.0)), "why")
    with pytest.raises(UsageError, match=r"^resid_pdrop 0\.2: train without$"):
        require_no_dropout(
            GPT2LMHeadModel(GPT2Config(**SMALL, **none, resid_pdrop=0.2)), "train without"
        )
    with pytest.raises(UsageError, match=r"^attention_dropout 0\.1: train without$"):
        require_no_dropout(
            LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)), "train without"
        )


MODEL = "micro:llama?trained=0"
PLAN = TrainingPlan(MODEL, "cpu/float64", steps=4, max_grad_norm=math.inf)
Batches = list[list[MicroBatch]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def batches() -> Batches:
    return training_batches(coder_of(MODEL), steps=4, micro_batches=2)


@pytest.fixture
def trainer() -> ReferenceTrainer:
    trainer = ReferenceTrainer()
    trainer.setup(PLAN)
    return trainer


def gradients(trainer: ReferenceTrainer) -> dict[str, Tensor]:
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_it_keeps_the_protocol() -> None:
    trainer: Trainer = ReferenceTrainer()
    assert isinstance(trainer, ReferenceTrainer)


def test_the_loss_of_a_flat_model_is_the_logarithm_of_its_vocabulary(
    trainer: ReferenceTrainer,
) -> None:
    flat: Any = lambda input_ids, attention_mask: SimpleNamespace(  # noqa: E731
        logits=torch.zeros(*input_ids.shape, 50)
    )
    trainer.model = flat
    micro_batch = {
        "input_ids": torch.tensor([[1, 2, 3, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "labels": torch.tensor([[IGNORED, 2, 3, IGNORED]]),
    }
    # Two label tokens of the ten that the whole step has.
    loss = float(trainer.compute_loss(micro_batch, 10))
    assert loss == pytest.approx(2 / 10 * math.log(50), rel=1e-6)


def merged(step: list[MicroBatch]) -> MicroBatch:
    """All rows of a step as one micro-batch."""
    length = max(micro_batch["labels"].shape[1] for micro_batch in step)
    fill = {"input_ids": 258, "attention_mask": 0, "labels": IGNORED}
    return {
        name: torch.cat(
            [nn.functional.pad(m[name], (0, length - m[name].shape[1]), value=value) for m in step]
        )
        for name, value in fill.items()
    }


def test_accumulated_gradients_are_those_of_all_rows_at_once(
    trainer: ReferenceTrainer, batches: Batches
) -> None:
    initial = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    parts = trainer.step(batches[0])
    accumulated = {name: gradient.clone() for name, gradient in gradients(trainer).items()}
    trainer.model.load_state_dict(initial)
    whole = trainer.step([merged(batches[0])])
    assert whole.num_tokens == parts.num_tokens
    assert whole.loss == pytest.approx(parts.loss, rel=1e-12)
    assert len(accumulated) == 39
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-9, atol=1e-14)


def test_means_of_micro_batches_would_be_another_loss(
    trainer: ReferenceTrainer, batches: Batches
) -> None:
    whole = trainer.step(batches[0]).loss
    alone = []
    for micro_batch in batches[0]:
        fresh = ReferenceTrainer()
        fresh.setup(PLAN)
        alone.append(fresh.step([micro_batch]).loss)
    assert abs(sum(alone) / len(alone) - whole) > 1e-4 * whole


def test_the_first_adamw_step_is_the_sign_of_the_gradient(
    trainer: ReferenceTrainer, batches: Batches
) -> None:
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    report = trainer.step(batches[0])
    rate, decay, epsilon = report.learning_rate, 0.01, 1e-8
    for name, gradient in gradients(trainer).items():
        # Both moments are those of one gradient: their quotient is g / (|g| + epsilon).
        step = rate * gradient / (gradient.abs() + epsilon)
        expected = before[name] * (1 - rate * decay) - step
        actual = trainer.model.get_parameter(name).detach()
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_the_report_has_the_norm_before_clipping(batches: Batches) -> None:
    trainer = ReferenceTrainer()
    trainer.setup(TrainingPlan(MODEL, "cpu/float64", max_grad_norm=1e-3))
    report = trainer.step(batches[0])
    clipped = math.sqrt(sum(float((g**2).sum()) for g in gradients(trainer).values()))
    assert report.grad_norm > 0.1
    # torch adds 1e-6 to the norm that it divides by.
    assert clipped == pytest.approx(1e-3 * report.grad_norm / (report.grad_norm + 1e-6), rel=1e-9)


def test_gradients_stay_until_the_next_step_begins(
    trainer: ReferenceTrainer, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.step(batches[0])
    assert all(p.grad is not None for p in trainer.model.parameters())
    seen: list[bool] = []
    compute_loss = trainer.compute_loss

    def look(micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        seen.append(any(p.grad is not None for p in trainer.model.parameters()))
        return compute_loss(micro_batch, num_step_tokens)

    monkeypatch.setattr(trainer, "compute_loss", look)
    trainer.step(batches[1])
    assert seen == [False, True]  # the second micro-batch adds to the first one's


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, trainer: ReferenceTrainer, batches: Batches
) -> None:
    reports = [trainer.step(batch) for batch in batches[:2]]
    trainer.save(tmp_path)
    saved = fingerprint(trainer.state_dict())
    reports += [trainer.step(batch) for batch in batches[2:]]
    assert [report.step for report in reports] == [0, 1, 2, 3]

    resumed = ReferenceTrainer()
    resumed.setup(PLAN)
    assert fingerprint(resumed.state_dict()) != saved
    resumed.load(tmp_path)
    assert fingerprint(resumed.state_dict()) == saved
    assert [resumed.step(batch) for batch in batches[2:]] == reports[2:]


def test_a_state_dict_is_a_checkpoint_in_memory(
    trainer: ReferenceTrainer, batches: Batches
) -> None:
    trainer.step(batches[0])
    other = ReferenceTrainer()
    other.setup(PLAN)
    other.load_state_dict(trainer.state_dict())
    assert fingerprint(other.state_dict()) == fingerprint(trainer.state_dict())


def test_a_torn_down_trainer_holds_nothing(trainer: ReferenceTrainer) -> None:
    trainer.teardown()
    assert not hasattr(trainer, "model")
    assert not hasattr(trainer, "optimizer")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            TrainingPlan(MODEL, "cpu/float32", features=frozenset({"cpu-offload"})),
            (
                "ReferenceTrainer does not know the features cpu-offload; it knows: compile, lora,"
                " loss-scaling, mixed-precision, packed, recompute"
            ),
        ),
        (
            TrainingPlan(MODEL, "cpu/float32", mesh={"dp": 1, "tp": 2}),
            "ReferenceTrainer does not know the axes of a mesh tp; it knows: dp",
        ),
        (
            TrainingPlan(MODEL, "cpu/float32", mesh={"dp": 2}),
            (
                "a mesh of dp=2 has 2 ranks, and this world 1: start it by `assay check train"
                " --mesh`, by assay.launch, or by torchrun"
            ),
        ),
    ],
)
def test_what_it_cannot_do_is_refused(plan: TrainingPlan, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        ReferenceTrainer().setup(plan)
    assert str(raised.value) == message


def test_a_model_without_trainable_parameters_is_refused() -> None:
    class Frozen(ReferenceTrainer):
        def build_model(self, plan: TrainingPlan) -> nn.Module:
            return super().build_model(plan).requires_grad_(requires_grad=False)

    with pytest.raises(UsageError, match=r"^micro:llama\?trained=0 has no trainable parameter$"):
        Frozen().setup(PLAN)


@pytest.mark.parametrize("run", ["cpu/bfloat16", "sim/float32"])
def test_other_runs_train_as_well(run: str, batches: Batches) -> None:
    trainer = ReferenceTrainer()
    trainer.setup(TrainingPlan(MODEL, run))
    losses = [trainer.step(batch).loss for batch in batches]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == 4
