"""The yardstick in double precision against independent arithmetic."""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from assay.hooks.suspension import ExactDouble, exact_for, is_suspended, suspended


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


CONFIG = LlamaConfig(
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=1,
    vocab_size=8,
    max_position_embeddings=2048,
)
CONFIG._attn_implementation = "eager"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: torch.zeros(2, dtype=torch.float32) + x,
    ],
)
def test_every_cast_to_float32_returns_float64(cast: Any) -> None:
    x = random(2, 2)
    with ExactDouble():
        assert cast(x).dtype is torch.float64
    assert not isinstance(cast(x), list)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_casts_are_unchanged(dtype: torch.dtype) -> None:
    with ExactDouble():
        assert random(2).to(dtype).dtype is dtype


def test_integers_become_double() -> None:
    with ExactDouble():
        assert torch.arange(3).float().dtype is torch.float64


def test_values_without_a_dtype_are_exact() -> None:
    with ExactDouble():
        least = torch.tensor(torch.finfo(torch.float64).min)
        made = torch.zeros(2), torch.linspace(0, 1, 4), torch.full((2,), 0.1)

    assert [one.dtype for one in (least, *made)] == [torch.float64] * 4
    assert made[-1][0] == 0.1


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape),
        lambda x: torch.randn(x.shape),
        lambda x: torch.rand(x.shape, dtype=x.dtype),  # stochastic depth of ConvNeXt and Swin
        torch.rand_like,
        torch.randn_like,
        lambda x: torch.empty_like(x).uniform_(0.9, 1.1),  # jitter of Switch Transformers' router
        lambda x: torch.empty_like(x).normal_(),
        lambda x: torch.empty_like(x).bernoulli_(0.5),
    ],
)
def test_random_numbers_are_those_of_float32(draw: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    expected = draw(torch.zeros(16))

    torch.manual_seed(0)
    with ExactDouble():
        drawn = draw(torch.zeros(16, dtype=torch.float64))

    assert torch.equal(drawn, expected.double())
    assert drawn.unique().numel() > 1


def test_casts_are_normal_afterwards() -> None:
    with ExactDouble():
        pass

    assert random(1).float().dtype is torch.float32
    assert torch.zeros(1).dtype is torch.float32


def test_rms_norm_of_a_hugging_face_model_is_exact() -> None:
    norm = LlamaRMSNorm(16, eps=1e-5).double()
    x = 100 * random(4, 16)
    expected = torch.tensor(
        [
            [value / math.sqrt(math.fsum(v * v for v in row) / 16 + 1e-5) for value in row]
            for row in x.tolist()
        ],
        dtype=torch.float64,
    )

    with ExactDouble():
        exact = norm(x)

    assert relative(exact, expected) < 1e-15
    assert relative(norm(x), expected) > 1e-9  # .double() alone is float32 inside


def test_rotary_tables_of_a_hugging_face_model_are_exact_at_position_2000() -> None:
    rotary = LlamaRotaryEmbedding(CONFIG).double()
    positions = [0, 1, 1000, 2000]
    frequencies = rotary.inv_freq.tolist()  # as stored, widened
    expected = torch.tensor(
        [[math.cos(position * f) for f in frequencies * 2] for position in positions],
        dtype=torch.float64,
    )

    with ExactDouble():
        cos, _ = rotary(random(1, 4, 16), torch.tensor([positions]))

    assert cos.dtype is torch.float64
    assert relative(cos[0], expected) < 1e-15
    plain, _ = rotary(random(1, 4, 16), torch.tensor([positions]))
    assert relative(plain[0].double(), expected) > 1e-9


def test_attention_of_a_hugging_face_model_is_exact() -> None:
    attention = LlamaAttention(CONFIG, 0).double().eval()
    rotary = LlamaRotaryEmbedding(CONFIG).double()
    x = random(1, 5, 16)
    mask = torch.full((1, 1, 5, 5), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)

    with ExactDouble(), torch.no_grad():
        tables = rotary(x, torch.arange(5)[None])
        exact, _ = attention(x, tables, mask)
    with torch.no_grad():
        plain, _ = attention(x, tables, mask)

    expected = _attention(attention, x, tables)
    assert relative(exact, expected) < 1e-14
    assert relative(plain, expected) > 1e-9  # its softmax is float32


def _attention(module: LlamaAttention, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention with two query heads and one of keys, row by row in Python floats."""
    q = module.q_proj(x).view(1, 5, 2, 8).transpose(1, 2)
    k = module.k_proj(x).view(1, 5, 1, 8).transpose(1, 2)
    v = module.v_proj(x)[0].tolist()
    q, k = apply_rotary_pos_emb(q, k, *tables)
    result = []
    for position in range(5):
        heads: list[float] = []
        for head in range(2):
            query = q[0, head, position].tolist()
            scores = [
                math.fsum(a * b for a, b in zip(query, k[0, 0, key].tolist(), strict=True))
                / math.sqrt(8)
                for key in range(position + 1)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = math.fsum(weights)
            heads += [
                math.fsum(w * v[key][dim] for key, w in enumerate(weights)) / total
                for dim in range(8)
            ]
        result.append(heads)
    output: Tensor = module.o_proj(torch.tensor([result], dtype=torch.float64))
    return output.detach()


def test_values_that_model_code_cached_in_another_dtype_are_dropped() -> None:
    def positions() -> Tensor:
        return torch.arange(3, dtype=torch.float32) / 3

    positions.__module__ = "transformers.models.any.modeling_any"
    of_model = functools.lru_cache(positions)
    positions.__module__ = "assay.any"
    own = functools.lru_cache(positions)
    with exact_for("float64"):
        assert (of_model().dtype, own().dtype) == (torch.float64, torch.float64)
    with exact_for("bfloat16"):
        assert (of_model().dtype, own().dtype) == (torch.float32, torch.float64)
        narrow = of_model()
    with exact_for("bfloat16"):
        assert of_model() is narrow
