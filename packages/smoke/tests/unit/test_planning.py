import pytest

from assay.errors import UsageError
from assay_smoke.planning import plan_smoke


def test_the_plan_is_two_processes_with_a_checkpoint_between() -> None:
    plan = plan_smoke("cpu/float32", "micro:llama", None)
    assert plan.describe() == (
        "micro:llama with LoRA on cpu/float32, uninterrupted: "
        "set-up step step checkpoint step step tear-down\n"
        "micro:llama with LoRA on cpu/float32, resumed: "
        "set-up resume step step checkpoint tear-down"
    )


def test_the_trainer_gets_the_same_plan() -> None:
    (cycle,) = plan_smoke("cpu/bfloat16", "micro:llama", None).cycles
    plan = cycle.training_plan
    assert (plan.model, plan.run, plan.steps, plan.resume_at) == (
        "micro:llama",
        "cpu/bfloat16",
        4,
        2,
    )
    assert plan.features == {"lora"}


@pytest.mark.parametrize(
    ("run", "model", "message"),
    [
        ("cpu", "micro:llama", r"^'cpu' is no run; "),
        ("cpu/float32", "micro:lama", r"^no recipe 'lama'; "),
        ("cpu/float32", "micro:bert", r"^micro:bert predicts no next token: "),
    ],
)
def test_a_plan_that_means_nothing_is_refused(run: str, model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_smoke(run, model, None)
