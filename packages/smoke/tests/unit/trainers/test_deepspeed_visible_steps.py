"""A paused call, whole gradients in `.grad`, and the ones written back to DeepSpeed."""

import threading

import pytest
import torch
from torch import Tensor, nn

from assay_smoke.trainers.deepspeed.visible_steps import PausedCall, ShownGradients


def test_what_is_after_the_pause_runs_when_the_call_is_finished() -> None:
    done: list[str] = []
    paused: PausedCall

    def call() -> None:
        done.append("clip")
        paused.pause()
        done.append("step")

    paused = PausedCall(call)

    assert paused.start()
    assert done == ["clip"]
    paused.finish()
    assert done == ["clip", "step"]


def test_call_that_ends_before_its_pause_is_told_apart() -> None:
    done: list[str] = []
    paused = PausedCall(lambda: done.append("skipped"))

    assert not paused.start()
    assert done == ["skipped"]


def test_error_before_the_pause_is_raised_by_start() -> None:
    def call() -> None:
        raise ValueError("no gradients")

    with pytest.raises(ValueError, match="no gradients"):
        PausedCall(call).start()


def test_error_after_the_pause_is_raised_by_finish() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()
        raise ValueError("no memory")

    paused = PausedCall(call)
    assert paused.start()

    with pytest.raises(ValueError, match="no memory"):
        paused.finish()


def test_call_that_is_never_finished_does_not_keep_the_process_alive() -> None:
    paused: PausedCall

    def call() -> None:
        paused.pause()

    paused = PausedCall(call)
    assert paused.start()

    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("paused call")]
    assert waiting
    assert all(thread.daemon for thread in waiting)
    paused.finish()


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
