"""Whole gradients in `.grad`, and the ones written back to DeepSpeed."""

import torch
from torch import Tensor, nn

from assay_smoke.trainers.deepspeed.visible_steps import ShownGradients


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((2,), 3.0, dtype=torch.bfloat16)) for _ in range(2)]


def test_gradients_stand_in_float32_beside_narrower_parameters() -> None:
    held = parameters()
    ShownGradients(held).show(lambda parameter: torch.full(parameter.shape, 1 + 2.0**-20))

    for parameter in held:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1 + 2.0**-20] * 2


def test_unchanged_gradients_are_not_given_back() -> None:
    held, written = parameters(), list[Tensor]()
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    assert held[1].grad is not None
    held[1].grad.fill_(0.5)

    shown.hide(lambda parameter, value: written.append(value))

    assert [value.tolist() for value in written] == [[0.5, 0.5]]


def test_what_deepspeed_had_there_stands_there_again_as_it_is_written_to() -> None:
    held = parameters()
    own = torch.full((2,), 7.0, dtype=torch.bfloat16)
    held[0].grad = own
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    seen: list[Tensor | None] = []
    assert held[0].grad is not None
    held[0].grad.fill_(2.0)

    shown.hide(lambda parameter, value: seen.append(parameter.grad))

    assert seen == [own]
    assert held[1].grad is None


def test_next_backward_pass_gives_gradients_in_the_dtype_of_the_parameter() -> None:
    held = parameters()
    shown = ShownGradients(held)
    shown.show(lambda parameter: torch.ones(parameter.shape))
    shown.hide()

    (held[0] * 2).sum().backward()

    assert held[0].grad is not None
    assert held[0].grad.dtype == torch.bfloat16
