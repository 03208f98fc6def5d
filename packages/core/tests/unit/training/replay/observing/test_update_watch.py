"""What a step changes, beside what it should."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor, nn

from assay.training.replay.observing.update_watch import MovedElements, UpdateWatch
from assay.training.replay.stage_values import StepValueHandler, ValueAddress

if TYPE_CHECKING:
    from assay.training.protocol import Trainer

RATE = 0.5


class Seen(StepValueHandler):
    """A handler that keeps what it is shown, and whose reference moves every element by -RATE."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        self.values[f"{address.stage.module}:{address.port}"] = value
        is_update = address.port.startswith("update.")
        return torch.full_like(value, -RATE) if is_update else value


def make_step(watch: UpdateWatch, *, later: float = 0.0, frozen: float = 0.0) -> dict[str, Tensor]:
    """One step of momentum on ones; `later`, `frozen`: what changes after it."""
    trainer: Any = watch.trainer
    watch.begin_step()
    trained = watch.trained()
    trainer.model.weight.grad = torch.ones_like(trainer.model.weight)
    trainer.optimizer.step()
    watch.observe_updates(trained)
    with torch.no_grad():
        trainer.model.weight[0, 0] += later
        trainer.model.bias += frozen
    watch.end_step()
    return cast("Seen", watch.handler).values


@pytest.fixture
def watch() -> UpdateWatch:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=RATE, momentum=0.9)
    made: Any = SimpleNamespace(model=model, optimizer=optimizer)
    return UpdateWatch(cast("Trainer", made), Seen())


def test_update_is_the_change_since_the_step_began(watch: UpdateWatch) -> None:
    values = make_step(watch)

    assert torch.allclose(values[":update.weight"], torch.full((3, 4), -RATE).double())
    assert torch.equal(values[":momentum_buffer.weight"], torch.ones(3, 4))
    assert int(values[":changed-later.weight"]) == 0
    assert int(values[":changed-untrained"]) == 0


@pytest.mark.parametrize(
    ("changed", "port"),
    [({"later": 1.0}, ":changed-later.weight"), ({"frozen": 1.0}, ":changed-untrained")],
)
def test_what_changes_beside_the_update_is_counted(
    watch: UpdateWatch, changed: dict[str, float], port: str
) -> None:
    assert int(make_step(watch, **changed)[port]) == 1


def test_elements_that_an_update_leaves_where_they_are_are_not_moved(watch: UpdateWatch) -> None:
    with torch.no_grad():
        # In float32 half of 1 is no change of 2**26.
        cast("Any", watch.trainer).model.weight[0] = 2.0**26

    make_step(watch)

    assert watch.moved == MovedElements(num_expected=12, num_moved=8)
