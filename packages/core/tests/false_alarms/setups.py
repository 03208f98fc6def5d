"""Correct code that computes in another way: none of it may fail.

Each function is given with `--candidate-setup`, for generation and for training: weights are read
when they are used, and keep their gradients.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def without_mkldnn(model: Any) -> None:
    """Torch's own products instead of the vendor's library."""
    del model
    torch.backends.mkldnn.set_flags(_enabled=False)


def attention_in_parts(model: Any) -> None:
    """Scaled dot-product attention as two products and a softmax."""
    del model
    torch.backends.cuda.enable_flash_sdp(enabled=False)  # of the CPU as well
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)


def eager_attention(model: Any) -> None:
    """Attention that keeps its probabilities for backward."""
    model.set_attn_implementation("eager")


def eager_experts(model: Any) -> None:
    """One expert after the other."""
    model.set_experts_implementation("eager")


def batched_experts(model: Any) -> None:
    """All experts as one batched product."""
    model.set_experts_implementation("batched_mm")


def two_threads(model: Any) -> None:
    """Sums that are shared out to two threads."""
    del model
    torch.set_num_threads(2)


def fused_norms(model: Any) -> None:
    """Norms as one operation, which rounds once."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = _fused_norm(module)
        elif hasattr(module, "_norm"):
            module.forward = _fused_norm_with_offset(module)


def exact_sums(model: Any) -> None:
    """Projections in float64, rounded once."""
    _replace_projections(model, _multiply_exactly)


def sums_backwards(model: Any) -> None:
    """Projections that add up in the opposite order."""
    _replace_projections(
        model, lambda x, weight, bias: functional.linear(x.flip(-1), weight.flip(-1), bias)
    )


def biases_added_last(model: Any) -> None:
    """Biases added to products that were rounded before, as row-parallel linears do."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is not None:
            module.forward = _bias_last(module)  # type: ignore[method-assign]


def two_ranks(model: Any) -> None:
    """Row-parallel projections on two ranks: two partial sums, each rounded, and their sum."""

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        parts = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
        first, second = (functional.linear(*part) for part in parts)
        return first + second if bias is None else first + second + bias

    _replace_projections(model, multiply, ("o_proj", "down_proj"))


def fused_gate_and_up(model: Any) -> None:
    """The two first projections of a gated MLP as one product."""
    for mlp in model.modules():
        if isinstance(getattr(mlp, "gate_proj", None), nn.Linear):
            mlp.forward = _fused_mlp(mlp)


def own_projections(model: Any) -> None:
    """Attention makes queries, keys and values by one product of its own."""
    for layer in model.model.layers:
        layer.self_attn.forward = _attention_with_projections(layer.self_attn)


def window_of_8192(model: Any) -> None:
    """Another window, both longer than any text."""
    assert model.config.sliding_window > 2048
    model.config.sliding_window = 8192


def _fused_norm(norm: Any) -> Any:
    shape = norm.weight.shape
    return lambda hidden_states: functional.rms_norm(
        hidden_states, shape, norm.weight, norm.variance_epsilon
    )


def _fused_norm_with_offset(norm: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        weight = 1.0 + norm.weight.float()
        return functional.rms_norm(x.float(), weight.shape, weight, norm.eps).to(x.dtype)

    return forward


def _fused_mlp(mlp: Any) -> Any:
    def forward(x: Tensor) -> Any:
        weight = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        gate, up = functional.linear(x, weight).chunk(2, -1)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    return forward


def _attention_with_projections(attention: Any) -> Any:
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb

    def forward(
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Any:
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([part.weight for part in parts])
        sizes = [part.out_features for part in parts]
        shape = (*hidden_states.shape[:2], -1, attention.head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2)
            for part in functional.linear(hidden_states, weight).split(sizes, -1)
        )
        query, key = rotate(query, key, *position_embeddings)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attention_mask,
            is_causal=attention_mask is None,
            scale=attention.scaling,
            enable_gqa=True,
        )
        return attention.o_proj(mixed.transpose(1, 2).flatten(2)), None

    return forward


def _bias_last(linear: nn.Linear) -> Any:
    return lambda input: functional.linear(input, linear.weight) + linear.bias  # noqa: A006


def _multiply_exactly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = None if bias is None else bias.double()
    return functional.linear(x.double(), weight.double(), exact).to(x.dtype)


def _replace_projections(model: Any, multiply: Any, names: tuple[str, ...] = ("",)) -> None:
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path.endswith(names):
            module.forward = _projection(module, multiply)  # type: ignore[method-assign]


def _projection(module: Any, multiply: Any) -> Any:
    return lambda input: multiply(input, module.weight, module.bias)  # noqa: A006


def compiled_layers(model: Any) -> None:
    """Every layer is compiled by itself, as `torch.compile` is used most."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer)
