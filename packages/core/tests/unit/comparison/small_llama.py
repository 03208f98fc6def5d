"""Dumps of a small Llama as five libraries compute and name it, for tests.

Layouts of modules, widths and ports follow vLLM 0.32, litgpt 0.5.13, ibm-fms 1.13, megatron-core 0.16 and
the bridge of transformer-lens 4.3, as captured on a CPU.

Shape legend: B batch, T tokens, H heads, D channels of a head, C channels.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from assay.dumps.protocol import Dump
from packages.core.tests.unit.comparison.memory_dump import make_dump

LAYERS, HEADS, KV_HEADS, HEAD, WIDTH, INNER, VOCAB, TOKENS = 3, 4, 2, 8, 32, 40, 48, 7
IDS = torch.arange(3, 3 + TOKENS)[None]

Ports = dict[str, tuple[str, Tensor]]
"""Class and value by `module:port`."""


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    weights = {
        "embed": random(VOCAB, WIDTH) * 4,
        "head": random(VOCAB, WIDTH),
        "norm": 1 + random(WIDTH),
    }
    for n in range(LAYERS):
        weights |= {f"{n}.{name}": 1 + random(WIDTH) for name in ("norm_1", "norm_2")}
        rows = {"q": WIDTH, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "gate": INNER, "up": INNER}
        weights |= {f"{n}.{name}": random(width, WIDTH) for name, width in rows.items()}
        weights |= {f"{n}.o": random(WIDTH, WIDTH), f"{n}.down": random(WIDTH, INNER)}
    return weights


def normed(value: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    return result


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def run(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all intermediate values by short name, such as `1.down`."""
    angles = torch.arange(TOKENS)[:, None] / 100 ** (torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = (function(angles).repeat(1, 2)[None] for function in (torch.cos, torch.sin))
    seen = {"cos": cos, "sin": sin, "angles": angles.repeat(1, 2)[:, None, None]}
    seen["embed"] = hidden = weights["embed"][IDS]
    for n in range(LAYERS):
        seen[f"{n}.in"] = hidden
        seen[f"{n}.norm_1"] = x = normed(hidden, weights[f"{n}.norm_1"])
        for name in "qkv":
            seen[f"{n}.{name}"] = x @ weights[f"{n}.{name}"].T
        q, k, v = (seen[f"{n}.{name}"].unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        scores = (q @ k.mT / HEAD**0.5).masked_fill(torch.ones(TOKENS, TOKENS).triu(1) > 0, -1e9)
        seen[f"{n}.mixed"] = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        seen[f"{n}.o"] = seen[f"{n}.mixed"] @ weights[f"{n}.o"].T
        seen[f"{n}.middle"] = hidden = hidden + seen[f"{n}.o"]
        seen[f"{n}.norm_2"] = x = normed(hidden, weights[f"{n}.norm_2"])
        seen[f"{n}.gate"], seen[f"{n}.up"] = (x @ weights[f"{n}.{one}"].T for one in ("gate", "up"))
        seen[f"{n}.act"] = torch.nn.functional.silu(seen[f"{n}.gate"])
        seen[f"{n}.product"] = seen[f"{n}.act"] * seen[f"{n}.up"]
        seen[f"{n}.down"] = seen[f"{n}.product"] @ weights[f"{n}.down"].T
        seen[f"{n}.out"] = hidden = hidden + seen[f"{n}.down"]
    seen["norm"] = normed(hidden, weights["norm"])
    seen["logits"] = seen["norm"] @ weights["head"].T
    return seen


def transformers(s: Mapping[str, Tensor]) -> Ports:
    ports: Ports = {"model.embed_tokens:input.input": ("Embedding", IDS)}
    ports["model.embed_tokens:output"] = "Embedding", s["embed"]
    for kind in ("cos", "sin"):
        ports[f"model.rotary_emb:output.{int(kind == 'sin')}"] = "LlamaRotaryEmbedding", s[kind]
    for n in range(LAYERS):
        at, attn, mlp = f"model.layers.{n}", f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp"
        ports |= call(f"{at}.input_layernorm", "LlamaRMSNorm", s[f"{n}.in"], s[f"{n}.norm_1"])
        for name in "qkv":
            ports |= call(f"{attn}.{name}_proj", "Linear", s[f"{n}.norm_1"], s[f"{n}.{name}"])
        ports |= call(f"{attn}.o_proj", "Linear", s[f"{n}.mixed"], s[f"{n}.o"])
        ports |= call(attn, "LlamaAttention", s[f"{n}.norm_1"], s[f"{n}.o"])
        ports[f"{attn}:input.position_embeddings.0"] = "LlamaAttention", s["cos"]
        ports |= call(
            f"{at}.post_attention_layernorm", "LlamaRMSNorm", s[f"{n}.middle"], s[f"{n}.norm_2"]
        )
        ports |= call(f"{mlp}.gate_proj", "Linear", s[f"{n}.norm_2"], s[f"{n}.gate"])
        ports |= call(f"{mlp}.act_fn", "SiLUActivation", s[f"{n}.gate"], s[f"{n}.act"])
        ports |= call(f"{mlp}.up_proj", "Linear", s[f"{n}.norm_2"], s[f"{n}.up"])
        ports |= call(f"{mlp}.down_proj", "Linear", s[f"{n}.product"], s[f"{n}.down"])
        ports |= call(mlp, "LlamaMLP", s[f"{n}.norm_2"], s[f"{n}.down"])
        ports |= call(at, "LlamaDecoderLayer", s[f"{n}.in"], s[f"{n}.out"])
    ports |= call("model.norm", "LlamaRMSNorm", s[f"{LAYERS - 1}.out"], s["norm"])
    ports |= call("lm_head", "Linear", s["norm"], s["logits"])
    ports[":input.input_ids"] = "LlamaForCausalLM", IDS
    ports[":output.logits"] = "LlamaForCausalLM", s["logits"]
    return ports


def call(module: str, kind: str, given: Tensor, result: Tensor, port: str = "input.x") -> Ports:
    return {f"{module}:{port}": (kind, given), f"{module}:output": (kind, result)}


def litgpt(s: Mapping[str, Tensor]) -> Ports:
    """Fuse q, k and v, whose k and v together are as wide as the attention; add an Identity."""
    ports: Ports = {"transformer.wte:input.input": ("Embedding", IDS)}
    ports["transformer.wte:output"] = "Embedding", s["embed"]
    for n in range(LAYERS):
        at = f"transformer.h.{n}"
        ports |= call(f"{at}.norm_1", "RMSNorm", s[f"{n}.in"], s[f"{n}.norm_1"])
        qkv = torch.cat([s[f"{n}.{name}"] for name in "qkv"], -1)
        ports |= call(f"{at}.attn.qkv", "Linear", s[f"{n}.norm_1"], qkv)
        ports |= call(f"{at}.attn.proj", "Linear", s[f"{n}.mixed"], s[f"{n}.o"])
        ports |= call(f"{at}.attn", "CausalSelfAttention", s[f"{n}.norm_1"], s[f"{n}.o"])
        ports |= call(f"{at}.post_attention_norm", "Identity", s[f"{n}.o"], s[f"{n}.o"])
        ports |= call(f"{at}.norm_2", "RMSNorm", s[f"{n}.middle"], s[f"{n}.norm_2"])
        ports |= call(f"{at}.mlp.fc_1", "Linear", s[f"{n}.norm_2"], s[f"{n}.gate"])
        ports |= call(f"{at}.mlp.fc_2", "Linear", s[f"{n}.norm_2"], s[f"{n}.up"])
        ports |= call(f"{at}.mlp.proj", "Linear", s[f"{n}.product"], s[f"{n}.down"])
        ports |= call(f"{at}.mlp", "LLaMAMLP", s[f"{n}.norm_2"], s[f"{n}.down"])
        ports |= call(at, "Block", s[f"{n}.in"], s[f"{n}.out"])
    ports |= call("transformer.ln_f", "RMSNorm", s[f"{LAYERS - 1}.out"], s["norm"])
    ports |= call("lm_head", "Linear", s["norm"], s["logits"])
    ports[":input.idx"] = "GPT", IDS
    ports[":output"] = "GPT", s["logits"]
    return ports


def interleaved(value: Tensor) -> Tensor:
    """Return heads with rotary pairs as neighbors, from heads with pairs in both halves."""
    heads: Tensor = value.unflatten(-1, (-1, 2, HEAD // 2))
    return heads.transpose(-1, -2).flatten(-3)


def fms(s: Mapping[str, Tensor]) -> Ports:
    """Interleave the rows of q and k in every head, and fuse gate and up."""
    ports: Ports = {"base.embedding:input.input": ("Embedding", IDS)}
    ports["base.embedding:output"] = "Embedding", s["embed"]
    for n in range(LAYERS):
        at = f"base.layers.{n}"
        ports |= call(f"{at}.ln", "LayerNormParameterized", s[f"{n}.in"], s[f"{n}.norm_1"])
        q, k = interleaved(s[f"{n}.q"]), interleaved(s[f"{n}.k"])
        qkv = torch.cat([q, k, s[f"{n}.v"]], -1)
        ports |= call(f"{at}.attn.in_proj.qkv_fused", "Linear", s[f"{n}.norm_1"], qkv)
        ports |= call(f"{at}.attn.dense", "Linear", s[f"{n}.mixed"], s[f"{n}.o"])
        ports |= call(f"{at}.attn", "MultiHeadAttention", s[f"{n}.norm_1"], s[f"{n}.o"], "input.q")
        ports |= call(f"{at}.ff_ln", "LayerNormParameterized", s[f"{n}.middle"], s[f"{n}.norm_2"])
        both = torch.cat([s[f"{n}.gate"], s[f"{n}.up"]], -1)
        ports |= call(f"{at}.ff.wg1_fused", "Linear", s[f"{n}.norm_2"], both)
        ports |= call(f"{at}.ff.a", "SiLU", s[f"{n}.gate"], s[f"{n}.act"])
        ports |= call(f"{at}.ff.w2", "Linear", s[f"{n}.product"], s[f"{n}.down"])
        ports |= call(f"{at}.ff", "GatedLinearUnit", s[f"{n}.norm_2"], s[f"{n}.down"])
        ports |= call(at, "LLaMABlock", s[f"{n}.in"], s[f"{n}.out"])
    ports |= call("base.dec_norm", "LayerNormParameterized", s[f"{LAYERS - 1}.out"], s["norm"])
    ports |= call("head", "LinearClassificationHead", s["norm"], s["logits"])
    ports[":output"] = "LLaMA", s["logits"]
    return ports


def megatron(s: Mapping[str, Tensor]) -> Ports:
    """Fuse q, k and v by group, return frequencies for cos and sin, call identities, in (T, B, C)."""
    ports: Ports = {"embedding.word_embeddings:input.input_": ("VocabParallelEmbedding", IDS)}
    ports["embedding.word_embeddings:output"] = "VocabParallelEmbedding", s["embed"]
    ports["rotary_pos_emb:output"] = "RotaryEmbedding", s["angles"]
    for n in range(LAYERS):
        at = f"decoder.layers.{n}"
        ports |= call(f"{at}.input_layernorm", "RMSNorm", s[f"{n}.in"], s[f"{n}.norm_1"])
        groups = [s[f"{n}.{name}"].unflatten(-1, (KV_HEADS, -1)) for name in "qkv"]
        qkv = torch.cat(groups, -1).flatten(-2)
        attn = f"{at}.self_attention"
        ports |= call(f"{attn}.linear_qkv", "ColumnParallelLinear", s[f"{n}.norm_1"], qkv)
        ports |= call(f"{attn}.linear_proj", "RowParallelLinear", s[f"{n}.mixed"], s[f"{n}.o"])
        ports |= call(attn, "SelfAttention", s[f"{n}.norm_1"], s[f"{n}.o"])
        ports[f"{attn}:input.rotary_pos_emb"] = "SelfAttention", s["angles"]
        ports |= call(
            f"{at}.pre_cross_attn_layernorm", "IdentityOp", s[f"{n}.middle"], s[f"{n}.middle"]
        )
        ports |= call(f"{at}.pre_mlp_layernorm", "RMSNorm", s[f"{n}.middle"], s[f"{n}.norm_2"])
        both = torch.cat([s[f"{n}.gate"], s[f"{n}.up"]], -1)
        ports |= call(f"{at}.mlp.linear_fc1", "ColumnParallelLinear", s[f"{n}.norm_2"], both)
        ports |= call(
            f"{at}.mlp.linear_fc2", "RowParallelLinear", s[f"{n}.product"], s[f"{n}.down"]
        )
        ports |= call(f"{at}.mlp", "MLP", s[f"{n}.norm_2"], s[f"{n}.down"])
        ports |= call(at, "TransformerLayer", s[f"{n}.in"], s[f"{n}.out"])
    ports |= call("decoder.final_layernorm", "RMSNorm", s[f"{LAYERS - 1}.out"], s["norm"])
    ports |= call("output_layer", "ColumnParallelLinear", s["norm"], s["logits"])
    ports = {
        name: (
            kind,
            value.transpose(0, 1) if value.shape[:2] == (1, TOKENS) and value.ndim > 2 else value,
        )
        for name, (kind, value) in ports.items()
    }
    ports[":input.input_ids"] = "GPTModel", IDS
    ports[":output"] = "GPTModel", s["logits"]
    return ports


def vllm(s: Mapping[str, Tensor]) -> Ports:
    """Keep hidden state and residual apart, activate and multiply in one module, in (T, C)."""
    ports: Ports = {"model.embed_tokens:output": ("VocabParallelEmbedding", s["embed"])}
    before, residual = s["embed"], None
    for n in range(LAYERS):
        at, attn, mlp = f"model.layers.{n}", f"model.layers.{n}.self_attn", f"model.layers.{n}.mlp"
        if residual is None:
            ports |= call(
                f"{at}.input_layernorm", "RMSNorm", before, s[f"{n}.norm_1"], "input.args.0"
            )
        else:
            ports |= both_apart(
                f"{at}.input_layernorm", before, residual, s[f"{n}.norm_1"], s[f"{n}.in"]
            )
        qkv = torch.cat([s[f"{n}.{name}"] for name in "qkv"], -1)
        ports |= call(f"{attn}.qkv_proj", "QKVParallelLinear", s[f"{n}.norm_1"], qkv)
        ports |= call(f"{attn}.o_proj", "RowParallelLinear", s[f"{n}.mixed"], s[f"{n}.o"])
        ports |= call(attn, "LlamaAttention", s[f"{n}.norm_1"], s[f"{n}.o"])
        ports |= both_apart(
            f"{at}.post_attention_layernorm",
            s[f"{n}.o"],
            s[f"{n}.in"],
            s[f"{n}.norm_2"],
            s[f"{n}.middle"],
        )
        both = torch.cat([s[f"{n}.gate"], s[f"{n}.up"]], -1)
        ports |= call(f"{mlp}.gate_up_proj", "MergedColumnParallelLinear", s[f"{n}.norm_2"], both)
        ports |= call(f"{mlp}.act_fn", "SiluAndMul", both, s[f"{n}.product"])
        ports |= call(f"{mlp}.down_proj", "RowParallelLinear", s[f"{n}.product"], s[f"{n}.down"])
        ports |= call(mlp, "LlamaMLP", s[f"{n}.norm_2"], s[f"{n}.down"])
        ports[f"{at}:input.hidden_states"] = "LlamaDecoderLayer", before
        if residual is not None:
            ports[f"{at}:input.residual"] = "LlamaDecoderLayer", residual
        before, residual = s[f"{n}.down"], s[f"{n}.middle"]
        ports[f"{at}:output.0"] = "LlamaDecoderLayer", before
        ports[f"{at}:output.1"] = "LlamaDecoderLayer", residual
    assert residual is not None
    ports |= both_apart("model.norm", before, residual, s["norm"], s[f"{LAYERS - 1}.out"])
    ports = {name: (kind, value[0]) for name, (kind, value) in ports.items() if value.ndim > 2}
    ports[":input.input_ids"] = "LlamaForCausalLM", IDS[0]
    ports[":output"] = "LlamaForCausalLM", s["norm"][0]
    ports["@logits_processor:input.hidden_states"] = "LogitsProcessor", s["norm"][0]
    ports["@logits_processor:output"] = "LogitsProcessor", s["logits"][0]
    return ports


def both_apart(
    module: str, hidden: Tensor, residual: Tensor, result: Tensor, total: Tensor
) -> Ports:
    values = {
        "input.args.0": hidden,
        "input.args.1": residual,
        "output.0": result,
        "output.1": total,
    }
    return {f"{module}:{port}": ("RMSNorm", value) for port, value in values.items()}


def transformer_lens(s: Mapping[str, Tensor]) -> Ports:
    """Wrap every module of transformers, between hooks that return their input."""

    def wrap() -> Iterator[tuple[str, tuple[str, Tensor]]]:
        for name, (kind, value) in transformers(s).items():
            module, _, port = name.partition(":")
            inner = module.replace("model.layers", "blocks").replace("lm_head", "unembed")
            inner = inner.replace(".self_attn", ".self_attn._original_component")
            if not module:
                yield name, (kind, value)
                continue
            hook = f"{inner}.hook_in" if port.startswith("input") else f"{inner}.hook_out"
            yield f"{hook}:input.x", ("HookPoint", value)
            yield f"{hook}:output", ("HookPoint", value)
            yield f"{inner}._original_component:{port}", (kind, value)
            yield f"{inner}:{port}", (f"{kind}Bridge", value)

    return dict(wrap())


LIBRARIES: dict[str, Callable[[Mapping[str, Tensor]], Ports]] = {
    one.__name__: one for one in (vllm, litgpt, fms, megatron, transformer_lens)
}


def dump_of(
    library: Callable[[Mapping[str, Tensor]], Ports], weights: Mapping[str, Tensor] | None = None
) -> Dump:
    """Return the dump of a run. A module after "@" runs in a pass of its own, after the model."""
    ports = library(run(weights or make_weights()))
    values, classes = {}, []
    for name, (kind, value) in ports.items():
        module, _, port = name.partition(":")
        values[module.removeprefix("@"), port, int(module.startswith("@"))] = value.contiguous()
        classes.append(kind)
    dump = make_dump(values)
    tensors = [
        replace(one, class_name=kind) for one, kind in zip(dump.tensors, classes, strict=True)
    ]
    return replace(dump, tensors=tensors)
