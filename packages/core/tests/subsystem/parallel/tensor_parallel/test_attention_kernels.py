"""Fused attention against eager attention, forward and backward: errors against float64.

Shapes: B batch, N query heads, K key/value heads, Q query tokens, S key tokens, D head features.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from assay.devices.base import Device
from packages.core.tests.subsystem.parallel.judging import differing, plain

BATCH, HEAD_DIM = 2, 16

_FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
# "implicit" has no mask where the kernel has a word for it, which lets it be the fastest.
KERNELS = {"math": [SDPBackend.MATH], "masked": _FUSED, "implicit": _FUSED}

MASKS = ("full", "causal", "left padding", "right padding", "documents")

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """One attention.

    num_cached: keys before that of the first query; window: keys that a query sees, its own one
    counts; dealt: how query heads share key/value heads.
    """

    mask: str
    num_heads: int
    num_kv_heads: int
    num_tokens: int
    num_cached: int = 0
    window: int | None = None
    scaling: float = HEAD_DIM**-0.5
    dealt: Literal["in order", "in turn"] = "in order"

    @property
    def num_keys(self) -> int:
        return self.num_cached + self.num_tokens


def allowed_BQS(setting: Setting) -> Tensor:
    """Which keys each query may see, by the definition of each mask."""
    query = torch.arange(setting.num_tokens)[:, None] + setting.num_cached
    key = torch.arange(setting.num_keys)[None, :]
    allowed = torch.ones(BATCH, setting.num_tokens, setting.num_keys, dtype=torch.bool)
    if setting.mask != "full":
        allowed &= key <= query
    if setting.window is not None:
        allowed &= query - key < setting.window
    if setting.mask == "left padding":
        allowed[1] &= (key >= 2) | (key == query)
    elif setting.mask == "right padding":
        allowed[1] &= (key < setting.num_keys - 2) | (key == query)
    elif setting.mask == "documents":
        allowed &= (query // 5) == (key // 5)
    return allowed


def inputs_of(setting: Setting) -> dict[str, Tensor]:
    """Query, keys, values and the gradient of the output, which float16 and bfloat16 can hold."""
    generator = torch.Generator().manual_seed(setting.num_keys)
    shapes = {
        "query": (BATCH, setting.num_heads, setting.num_tokens, HEAD_DIM),
        "key": (BATCH, setting.num_kv_heads, setting.num_keys, HEAD_DIM),
        "value": (BATCH, setting.num_kv_heads, setting.num_keys, HEAD_DIM),
        "gradient": (BATCH, setting.num_tokens, setting.num_heads, HEAD_DIM),
    }
    return {
        name: torch.randn(shape, generator=generator).bfloat16().half()
        for name, shape in shapes.items()
    }


def attend(setting: Setting, dtype: torch.dtype, device: str, kernel: str) -> Results:
    """Output and gradients. kernel: "eager" or one of `KERNELS`."""
    tensors = {n: t.to(device, dtype).requires_grad_() for n, t in inputs_of(setting).items()}
    query, key, value, gradient = tensors.values()
    if setting.dealt == "in turn":
        query = query[:, torch.arange(setting.num_heads).roll(1)]
    module: Any = SimpleNamespace(
        num_key_value_groups=setting.num_heads // setting.num_kv_heads, training=True
    )
    allowed_B1QS = allowed_BQS(setting)[:, None].to(device)
    if kernel == "eager":
        lowest = torch.finfo(dtype).min
        additive = torch.zeros(allowed_B1QS.shape, dtype=dtype, device=device)
        mask = additive.masked_fill(~allowed_B1QS, lowest)
        output, _ = eager_attention_forward(module, query, key, value, mask, setting.scaling)
    else:
        has_word = setting.mask in ("full", "causal") and not setting.window
        implicit = kernel == "implicit" and has_word and not setting.num_cached
        module.is_causal = setting.mask != "full"
        with sdpa_kernel(KERNELS[kernel]):
            output, _ = sdpa_attention_forward(
                module,
                query,
                key,
                value,
                None if implicit else allowed_B1QS,
                scaling=setting.scaling,
            )
    output.backward(gradient)
    results = {"output": plain(output)}
    for name in ("query", "key", "value"):
        found = tensors[name].grad
        assert found is not None
        results[f"{name} gradient"] = plain(found)
    return results


def compare(
    setting: Setting, dtype: str, device: Device, kernel: str, wrong: Setting | None = None
) -> list[str]:
    """What a fused kernel in the setting `wrong` computes otherwise than `setting` asks for."""
    exact = attend(setting, torch.float64, "cpu", "eager")
    noise = attend(setting, getattr(torch, dtype), device.torch_device, "eager")
    actual = attend(wrong or setting, getattr(torch, dtype), device.torch_device, kernel)
    return differing(actual, noise, exact)


# Tokens of the call, and those before it: one decoded, a prefill below and above the tiles of the
# kernels of the host, 32 queries and 512 keys, and one that goes on after another.
LENGTHS = [(1, 12), (7, 0), (33, 0), (9, 8), (40, 500)]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("kernel", [*KERNELS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_kernel_computes_what_eager_attention_does(
    device: Device, mask: str, heads: tuple[int, int], window: int | None, dtype: str, kernel: str
) -> None:
    found = {
        length: compare(Setting(mask, *heads, *length, window), dtype, device, kernel)
        for length in LENGTHS
    }
    assert found == {length: [] for length in LENGTHS}


GROUPED = Setting("causal", 4, 2, 33)
WINDOWED = Setting("causal", 4, 4, 33, window=8)
PADDED = Setting("left padding", 4, 2, 33)


@pytest.mark.parametrize("kernel", [*KERNELS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(GROUPED, replace(GROUPED, mask="full"), id="sees-what-follows"),
        pytest.param(WINDOWED, replace(WINDOWED, window=9), id="the-window-is-one-longer"),
        pytest.param(PADDED, replace(PADDED, mask="causal"), id="padding-is-seen"),
        pytest.param(GROUPED, replace(GROUPED, scaling=32**-0.5), id="the-scale-is-another"),
        pytest.param(GROUPED, replace(GROUPED, dealt="in turn"), id="groups-are-mixed-up"),
    ],
)
def test_wrong_kernel_is_found_in_its_output_and_all_gradients(
    device: Device, right: Setting, wrong: Setting, dtype: str, kernel: str
) -> None:
    found = compare(right, dtype, device, kernel, wrong)
    assert found == ["output", "query gradient", "key gradient", "value gradient"]


@pytest.mark.parametrize("mask", MASKS)
def test_every_query_attends_to_a_key_and_masks_differ(mask: str) -> None:
    allowed = allowed_BQS(Setting(mask, 4, 2, 9, 8))
    assert bool(allowed.any(-1).all())
    others = [allowed_BQS(Setting(other, 4, 2, 9, 8)) for other in MASKS if other != mask]
    assert len(others) == 4
    assert not any(allowed.equal(other) for other in others)
