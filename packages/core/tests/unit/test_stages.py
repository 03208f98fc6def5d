import pytest

from assay.sites import Call, CallSite
from assay.stages import Stage, stage_that_made
from assay.training.protocol import TrainingPlan


def call(module: str, caller: str | None) -> Call:
    return Call(CallSite(0, module), "Linear", caller, 0)


def test_inputs_were_made_by_the_caller() -> None:
    made = stage_that_made(call("mlp.down_proj", "mlp"), "input.input")

    assert made == Stage("mlp", "forward")


@pytest.mark.parametrize("port", ["output", "output.0", "changed.past_key_values.0.keys"])
def test_results_and_changed_arguments_were_made_by_the_called_module(port: str) -> None:
    assert stage_that_made(call("attn", "layer"), port) == Stage("attn", "forward")


def test_inputs_of_the_root_call_are_a_separate_stage() -> None:
    assert stage_that_made(call("", None), "input.position_ids") == Stage("", "inputs")
    assert stage_that_made(call("", None), "output.logits") == Stage("", "forward")


def test_inputs_made_by_the_model_s_own_code_are_not_the_inputs_phase() -> None:
    assert stage_that_made(call("layers.0", ""), "input.attention_mask") == Stage("", "forward")


def test_whole_model_has_a_name_in_text() -> None:
    assert str(Stage("")) == "(model)"
    assert str(Stage("model.norm")) == "model.norm"


def test_training_plan_has_the_defaults_of_the_command() -> None:
    plan = TrainingPlan("micro:llama", "cpu/float32")

    assert (plan.steps, plan.micro_batches, plan.resume_at, plan.seed) == (3, 2, None, 0)
