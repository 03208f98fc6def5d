from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as imported_before
from torch.utils.checkpoint import checkpoint

from assay.devices.registry import open_device
from assay.training.replay.determinism import comparable, comparable_dropout

# Looked up when it is called, as model code does it, and imported by name.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda x: functional.dropout(x, 0.5, training=True),
    "imported": lambda x: imported_before(x, 0.5, training=True),
    "module": nn.Dropout(0.5),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_every_dtype_drops_the_same(name: str) -> None:
    kept = []
    for dtype in ("float64", "float32", "bfloat16"):
        torch.manual_seed(3)
        with comparable(dtype, open_device("cpu")):
            dropped = CALLS[name](torch.ones(1000, dtype=getattr(torch, dtype)))
        assert dropped.dtype is getattr(torch, dtype)
        kept.append(dropped != 0)

    assert 400 < int(kept[0].sum()) < 600
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_what_is_kept_is_scaled() -> None:
    with comparable_dropout():
        dropped = functional.dropout(torch.full((1000,), 3.0), 0.25, training=True)

    assert set(dropped.tolist()) == {0.0, 4.0}


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["", "recomputed"])
def test_compiled_code_drops_the_same_in_one_graph(is_recomputed: bool) -> None:
    def drop_twice(x: Tensor) -> Tensor:
        # Two draws over the same values are not one.
        return functional.dropout(x, 0.5, training=True) - functional.dropout(x, 0.5, training=True)

    compiled = torch.compile(drop_twice, backend="aot_eager", fullgraph=True)
    found = []
    for function in (drop_twice, compiled):
        torch.manual_seed(3)
        x = torch.ones(1000, requires_grad=True)
        with comparable_dropout():
            dropped = checkpoint(function, x, use_reentrant=False) if is_recomputed else function(x)
            dropped.square().sum().backward()
        found.append((dropped, x.grad, torch.get_rng_state()))

    expected, actual = found
    assert set(expected[0].tolist()) == {-2.0, 0.0, 2.0}
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


def test_nothing_is_dropped_outside_of_training() -> None:
    x = torch.ones(100)
    with comparable_dropout():
        assert functional.dropout(x, 0.5, training=False) is x
        assert functional.dropout(x, 0.0, training=True) is x


def test_functions_are_restored() -> None:
    before = functional.dropout, functional.scaled_dot_product_attention
    with comparable_dropout():
        assert functional.dropout is not before[0]

    assert (functional.dropout, functional.scaled_dot_product_attention) == before


def test_attention_with_dropout_is_alike_in_all_dtypes_and_without_it_the_kernels() -> None:
    query, key, value = torch.randn(3, 1, 4, 6, 8, dtype=torch.float64).unbind(0)
    key, value = key[:, :2], value[:, :2]
    settings: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    plain = functional.scaled_dot_product_attention(query, key, value, **settings)
    with comparable_dropout():
        same = functional.scaled_dot_product_attention(query, key, value, **settings)
        outputs = []
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(5)
            q, k, v = (part.to(dtype) for part in (query, key, value))
            outputs.append(
                functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **settings)
            )

    assert torch.equal(same, plain)
    assert torch.allclose(outputs[0].float(), outputs[1], atol=1e-5)
    assert not torch.allclose(outputs[0], plain, atol=1e-2)


def test_query_without_a_key_gets_zeros_and_a_finite_gradient() -> None:
    query, key, value = torch.randn(3, 1, 1, 4, 8).unbind(0)
    query.requires_grad_()
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    allowed[1] = False
    with comparable_dropout():
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, dropout_p=0.5
        )
    output.sum().backward()

    assert torch.equal(output[..., 1, :], torch.zeros(1, 1, 8))
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())


@pytest.mark.parametrize(
    ("preserve", "same"), [(True, True), (False, False)], ids=["restored", "lost"]
)
def test_recompute_in_backward_drops_the_same_if_it_has_the_generator(
    *, preserve: bool, same: bool
) -> None:
    x = torch.ones(64, requires_grad=True)
    with comparable_dropout():
        torch.manual_seed(1)
        y = checkpoint(
            lambda value: functional.dropout(value * 2, 0.5, training=True),
            x,
            use_reentrant=False,
            preserve_rng_state=preserve,
        )
        y.sum().backward()

    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0) is same
