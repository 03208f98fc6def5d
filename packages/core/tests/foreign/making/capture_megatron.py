"""python -m packages.core.tests.foreign.making.capture_megatron MODELS TRACES, with megatron-core 0.16.0 on one process without CUDA."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

import assay
from packages.core.tests.foreign.making.inputs import IDS, folders

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    kv_channels=16, normalization="RMSNorm", layernorm_epsilon=1e-5, gated_linear_unit=True,
    activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
    attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
    masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
    attention_softmax_in_fp32=True, params_dtype=torch.float32, persist_layer_norm=False,
    perform_initialization=False,
)  # fmt: skip
QUERY_ROWS, KEY_ROWS = 32, 16  # of one group


def convert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers by Megatron's names, queries, keys and values by group."""
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        projections = [weights[f"{theirs}self_attn.{name}_proj.weight"] for name in "qkv"]
        rows = (QUERY_ROWS, KEY_ROWS, KEY_ROWS)
        split = [one.split(size) for one, size in zip(projections, rows, strict=True)]
        fused = torch.cat([torch.cat(group) for group in zip(*split, strict=True)])
        mlp = [weights[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{ours}input_layernorm.weight": weights[f"{theirs}input_layernorm.weight"],
            f"{ours}pre_mlp_layernorm.weight": weights[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": fused,
            f"{ours}self_attention.linear_proj.weight": weights[f"{theirs}self_attn.o_proj.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat(mlp),
            f"{ours}mlp.linear_fc2.weight": weights[f"{theirs}mlp.down_proj.weight"],
        }
    return found


# Megatron asks CUDA for a device and a random state, although it draws nothing here.
patch("torch.cuda.current_device", lambda: torch.device("cpu")).start()
patch.object(
    tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext)
).start()
torch.distributed.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29611", rank=0, world_size=1
)
parallel_state.initialize_model_parallel()
length = IDS.shape[1]
mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
for folder, trace in folders("megatron", "llama"):
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        CONFIG, spec, vocab_size=128, max_sequence_length=128, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, rotary_base=10000,
    ).eval()  # fmt: skip
    model.load_state_dict(convert(load_file(folder / "model.safetensors")), strict=False)
    with torch.no_grad(), assay.capture(model, trace):
        model(input_ids=IDS, position_ids=torch.arange(length)[None], attention_mask=mask)
