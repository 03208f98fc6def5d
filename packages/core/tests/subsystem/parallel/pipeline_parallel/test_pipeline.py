"""Pipelines against one process: losses, gradients, norms and updates, by reference value.

Each test has a sibling in which one thing is broken, and the same comparison finds it.
"""

from types import MethodType
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from assay.errors import UsageError
from assay.parallel.pipeline import Pipeline, cut_stage, divide_layers, pad_alike
from packages.core.tests.subsystem.parallel.pipeline_parallel.pipeline_runs import (
    Case,
    MicroBatchMeans,
    OwnNorm,
    Stages,
    load_own_stage,
    train_stages,
)
from packages.core.tests.subsystem.parallel.tiny_models import build_model
from packages.core.tests.subsystem.parallel.training_steps import (
    Record,
    disagreements,
    named_gradients,
    num_label_tokens,
    step_batch,
    to_device,
)


@pytest.mark.parametrize(
    "case",
    ["llama", "granite-untied", "qwen3-untied", "mistral", "mixtral", "phi3"],
    indirect=True,
)
@pytest.mark.world(pp=2)
def test_two_stages_train_as_one_process(mesh: DeviceMesh, case: Case) -> None:
    assert disagreements(train_stages(case.folder, mesh), case.expected) == []


@pytest.mark.parametrize("case", ["granite"], indirect=True)
@pytest.mark.world(pp=2)
def test_tied_ends_are_refused(mesh: DeviceMesh, case: Case) -> None:
    with pytest.raises(UsageError, match="the head is tied to the embeddings"):
        train_stages(case.folder, mesh)


@pytest.mark.world(pp=2)
def test_clipping_by_the_norm_of_one_rank_is_detected(mesh: DeviceMesh, case: Case) -> None:
    found = disagreements(train_stages(case.folder, mesh, pipeline_class=OwnNorm), case.expected)
    assert "norm of step 0" in found
    assert "updates of lm_head.weight" in found
    assert [text for text in found if text.startswith("gradients")] == []


@pytest.mark.world(pp=2)
def test_loss_over_the_tokens_of_a_micro_batch_is_detected(mesh: DeviceMesh, case: Case) -> None:
    found = disagreements(
        train_stages(case.folder, mesh, pipeline_class=MicroBatchMeans), case.expected
    )
    assert {"loss of step 0", "gradients of lm_head.weight"} <= {*found}


def _swap_masks_after_the_first_stage(stages: Stages) -> None:
    for index, stage in stages.items():
        if index > 0:
            with_mask = stage.forward

            def forward(
                self: Any, inputs_embeds: Any, attention_mask: Any = None, *, call: Any = with_mask
            ) -> Any:
                return call(inputs_embeds, attention_mask=attention_mask.roll(1, 0))

            stage.forward = MethodType(forward, stage)


@pytest.mark.world(pp=2)
def test_mask_of_other_rows_in_a_later_stage_is_detected(mesh: DeviceMesh, case: Case) -> None:
    actual = train_stages(case.folder, mesh, change=_swap_masks_after_the_first_stage)
    assert "loss of step 0" in disagreements(actual, case.expected)


def _forget_the_window(stages: Stages) -> None:
    for index, stage in stages.items():
        if index > 0:
            body: Any = stage.model
            body.config.sliding_window = None


@pytest.mark.parametrize("case", ["mistral"], indirect=True)
@pytest.mark.world(pp=2)
def test_sliding_window_missing_in_later_stages_is_detected(mesh: DeviceMesh, case: Case) -> None:
    actual = train_stages(case.folder, mesh, change=_forget_the_window)
    assert "loss of step 0" in disagreements(actual, case.expected)


def _repeat_the_multiplier(stages: Stages) -> None:
    for stage in stages.values():
        body: Any = stage.model
        body.embedding_multiplier = stage.config.embedding_multiplier  # type: ignore[union-attr]


@pytest.mark.parametrize("case", ["granite-untied"], indirect=True)
@pytest.mark.world(pp=2)
def test_embedding_multiplier_in_each_stage_is_detected(mesh: DeviceMesh, case: Case) -> None:
    actual = train_stages(case.folder, mesh, change=_repeat_the_multiplier)
    assert "loss of step 0" in disagreements(actual, case.expected)


@pytest.mark.world(pp=2)
def test_gradients_add_up_over_two_passes_of_one_step(mesh: DeviceMesh, case: Case) -> None:
    assert _accumulated(case, mesh, passes=2) == []


@pytest.mark.world(pp=2)
def test_skipped_pass_is_detected(mesh: DeviceMesh, case: Case) -> None:
    assert "loss of step 0" in _accumulated(case, mesh, passes=1)


def _accumulated(case: Case, mesh: DeviceMesh, passes: int) -> list[str]:
    """One step whose four micro-batches are given two at a time."""
    (stage,) = load_own_stage(case.folder, mesh["pp"]).values()
    pipeline = Pipeline(stage, mesh["pp"])
    batch = to_device(step_batch(0), mesh.device_type)
    losses = [
        pipeline.forward_backward(batch[2 * number : 2 * number + 2], num_label_tokens(batch))
        for number in range(passes)
    ]
    actual = Record(
        [float(sum(losses))], [], named_gradients(stage.named_parameters()), case.expected.updates
    )
    expected = Record(case.expected.losses[:1], [], case.expected.gradients, case.expected.updates)
    return [text for text in disagreements(actual, expected) if not text.startswith("norm")]


def test_stage_keeps_the_paths_of_the_whole_model() -> None:
    stage = cut_stage(build_model("llama"), 2, 1)
    paths = [name for name, _ in stage.named_modules()]
    assert paths[:4] == ["", "model", "model.layers", "model.layers.1"]
    assert "model.layers.1.mlp.down_proj" in paths
    assert {"model.norm", "model.rotary_emb", "lm_head"} <= {*paths}
    assert {"model.embed_tokens", "model.layers.0"}.isdisjoint(paths)


def test_layers_left_over_go_to_the_front() -> None:
    assert divide_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]


def test_micro_batches_with_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"equally many rows, not \[2, 1\]"):
        pad_alike([*step_batch(0, num=1), *step_batch(0, num=1, rows=1)])


def test_padding_has_no_label_and_is_not_attended_to() -> None:
    short, long = step_batch(0, num=2)
    padded = pad_alike([short, long])
    assert padded["input_ids"].shape == (4, 11)
    assert padded["attention_mask"][0].tolist() == [1] * 8 + [0] * 3
    assert padded["labels"][0].tolist() == [*short["labels"][0].tolist(), -100, -100, -100]
    assert padded["input_ids"][2:].equal(long["input_ids"])
