"""Write a micro model as a GGUF file, by the package gguf, as llama.cpp lays it out."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file

Edit = Callable[[dict[str, NDArray[np.float32]]], None]
_METADATA = {
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "head_dim": "add_key_length",
    "hidden_size": "add_embedding_length",
    "intermediate_size": "add_feed_forward_length",
    "max_position_embeddings": "add_context_length",
    "num_hidden_layers": "add_block_count",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "vocab_size": "add_vocab_size",
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "bos_token_id": "add_bos_token_id",
    "eos_token_id": "add_eos_token_id",
    "pad_token_id": "add_pad_token_id",
}


def write_gguf(
    model: Path, file: Path, kind: Kind, *, edit: Edit = lambda _: None,
    edit_blocks: Mapping[str, Callable[[NDArray[np.uint8]], None]] | None = None,
    tokens: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write all matrices in the type `kind`, Q8_0 if it does not divide their rows.

    edit: changes the tensors by their names in the file. edit_blocks: the bytes of a tensor, [rows, bytes].
    tokens: the vocabulary of a tokenizer that merges A and B.
    """
    config = json.loads((model / "config.json").read_text())
    name = config["model_type"]
    architecture = next(key for key, one in gguf.MODEL_ARCH_NAMES.items() if one == name)
    writer = gguf.GGUFWriter(file, name)
    for key, method in _METADATA.items():
        if config.get(key) is not None:
            getattr(writer, method)(config[key])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_merges(["A B"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    tensors = {}
    for own, tensor in load_file(model / "model.safetensors").items():
        values = _arrange(own, tensor.float().numpy(), config)
        if (found := names.get_name(own, try_suffixes=(".weight", ".bias"))) is None:
            assert own == "lm_head.weight", own  # the class has tied weights
            continue
        tensors[found] = np.ascontiguousarray(values)
    edit(tensors)
    for own, values in tensors.items():
        one = kind if values.ndim > 1 else Kind.F32
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[one][0]:
            one = Kind.Q8_0
        blocks = _quantize_q4_k(values) if one == Kind.Q4_K else gguf.quantize(values, one)
        if edit_blocks and own in edit_blocks:
            edit_blocks[own](blocks)
        writer.add_tensor(own, blocks, raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _arrange(
    own: str, values: NDArray[np.float32], config: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Return the values as llama.cpp stores them."""
    heads = config["num_attention_heads" if ".q_proj." in own else "num_key_value_heads"]
    if config["model_type"] == "llama" and (".q_proj." in own or ".k_proj." in own):
        halves = values.reshape(heads, 2, -1, values.shape[1])
        return halves.swapaxes(1, 2).reshape(values.shape)
    is_offset = config["model_type"] == "gemma2" and "norm." in own
    return values + np.float32(1) if is_offset else values


def _quantize_q4_k(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantize to 4 bits with scales and minima of 6 bits for each 32 inputs, which the package cannot."""
    parts = torch.from_numpy(values).reshape(-1, 8, 32)
    low = parts.amin(-1).clamp(max=0)
    step = (parts.amax(-1) - low) / 15
    d, dmin = (one.amax(-1, keepdim=True).div(63).half() for one in (step, -low))
    scale, least = (
        (one / whole.float()).round().clamp(0, 63) for one, whole in ((step, d), (-low, dmin))
    )
    steps = (d.float() * scale)[..., None], (dmin.float() * least)[..., None]
    codes = ((parts + steps[1]) / steps[0]).round().clamp(0, 15).to(torch.uint8)
    sc, m = scale.to(torch.uint8), least.to(torch.uint8)
    packed = torch.cat(
        [
            d.view(torch.uint8),
            dmin.view(torch.uint8),
            sc[:, :4] | (sc[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
            (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1),
        ],
        1,
    )
    return packed.reshape(len(values), -1).numpy()
