"""Conditions under which steps of two trainers are comparable, such as equal dropout masks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from assay.devices.base import Device
from assay.hooks.suspension import exact_for, is_suspended, suspended

_dropout, _attention = functional.dropout, functional.scaled_dot_product_attention


@contextmanager
def comparable_dropout() -> Iterator[None]:
    """Draw dropout masks from the host's generator, in float32, inside this context.

    Random numbers depend on device and dtype. The generator's state is compared too: a recompute
    that loses it gives other gradients.
    """
    module: Any = functional
    # The names serve backward, which may recompute forward without an active mode. The mode serves
    # code that has imported the functions.
    module.dropout, module.scaled_dot_product_attention = _drop, _attend
    try:
        with _DropoutMode():
            yield
    finally:
        module.dropout, module.scaled_dot_product_attention = _dropout, _attention


_observers: list[Callable[[Tensor], None]] = []


@contextmanager
def masks_observed(observer: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `observer` with the generator state before each mask; inside of `comparable_dropout`."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class _DropoutMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever func returns
        del types
        if func is _dropout and not is_suspended():
            return _drop(*args, **(kwargs or {}))
        if func is _attention and not is_suspended():
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# Arguments have torch's names, because callers may pass them by keyword.
def _drop(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    if not training or p == 0:
        return input
    # Compilers merge two draws with the same tensor argument, but not with fresh empty ones.
    like = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    draw = _draw_in_graph if torch.compiler.is_compiling() else _draw_scale
    scale = draw(like, p)
    return input.mul_(scale) if inplace else input * scale


def _draw_scale(like: Tensor, p: float) -> Tensor:
    """Draw the factor of each element, zero with probability `p`."""
    with suspended():
        for observe in _observers:
            observe(torch.get_rng_state())
        keep = torch.rand(like.shape, dtype=torch.float32) >= p
        scale = torch.where(keep, 1 / (1 - p) if p < 1 else 0.0, 0.0)
        return scale.to(device=like.device, dtype=like.dtype)


# As a custom op: a compiler that inlines the draw changes the numbers, and one with a graph break here
# does not compile recomputed layers at all.
_draw_in_graph = torch.library.custom_op(
    "assay::draw_dropout_scale",
    _draw_scale,
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)


@_draw_in_graph.register_fake
def _scale_of_unknown_values(like: Tensor, p: float) -> Tensor:
    del p
    return torch.empty_like(like)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    if not dropout_p:
        return _attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # Step by step, because no kernel takes a dropout mask.
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # Kernels return zeros for a query without keys, such as padding; softmax has no gradient there.
    no_key = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(no_key, 0).softmax(-1).masked_fill(no_key, 0)
    return _drop(weights, dropout_p) @ value


@contextmanager
def comparable(dtype: str, device: Device) -> Iterator[None]:
    """Use deterministic kernels and dtype-independent dropout masks inside this context."""
    with ExitStack() as stack:
        stack.enter_context(device.deterministic())
        stack.enter_context(comparable_dropout())
        stack.enter_context(exact_for(dtype))
        yield


def keep_no_cache(model: nn.Module) -> None:
    """Turn off the key-value cache in the configuration of each part of a model."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
