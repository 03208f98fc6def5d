import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.values.exact_double import ExactDouble


class _Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_suspended_outside() -> None:
    assert not is_suspended()


def test_suspension_nests_and_ends() -> None:
    with suspended():
        with suspended():
            assert is_suspended()
        assert is_suspended()
    assert not is_suspended()


def test_suspension_ends_with_an_exception() -> None:
    with pytest.raises(ValueError, match="invalid literal"), suspended():
        int("x")

    assert not is_suspended()


def test_function_modes_do_not_see_our_own_arithmetic() -> None:
    x = torch.ones(2)
    with _Counting() as mode:
        x.add(1)
        before = mode.calls
        with suspended():
            x.add(1)
        assert mode.calls == before == 1


def test_exact_double_leaves_our_own_casts_alone() -> None:
    with ExactDouble(), suspended():
        assert torch.ones(1, dtype=torch.float64).float().dtype is torch.float32


def test_another_thread_is_not_suspended() -> None:
    seen: list[bool] = []
    with suspended():
        thread = threading.Thread(target=lambda: seen.append(is_suspended()))
        thread.start()
        thread.join()

    assert seen == [False]


def test_tensors_that_are_made_in_inference_mode_can_be_changed_later() -> None:
    with torch.inference_mode():
        with suspended():
            total = torch.ones(2) + 1
            assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()

    total += 1
    assert total.tolist() == [3.0, 3.0]


def test_suspension_leaves_gradients_enabled() -> None:
    with suspended():
        assert torch.is_grad_enabled()
