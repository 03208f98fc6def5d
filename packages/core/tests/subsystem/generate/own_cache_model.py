"""A llama whose layers keep a running mean of the keys, in a cache of its own class."""

from pathlib import Path
from typing import Any

from packages.core.tests.subsystem.generate.unreached_models import save_own_code

_SETTINGS: dict[str, Any] = {
    "vocab_size": 384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}

_MODELING = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention


class MeanKeyLayer:
    assay_states = ("mean_keys",)

    def __init__(self):
        self.keys = self.values = self.mean_keys = None

    def update(self, keys, values):
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        self.keys, self.values = keys, values
        return keys, values

    def update_mean(self, is_token, counts):
        """Return the mean of the keys up to each of the last tokens, without paddings.

        is_token, counts: (B, tokens of the call).
        """
        added = self.keys[..., -counts.shape[1] :, :]
        wide = torch.promote_types(added.dtype, torch.float32)
        sums = (added.to(wide) * is_token[:, None, :, None]).cumsum(-2)
        if self.mean_keys is not None:
            before = (counts - is_token)[:, None, :1]
            sums = sums + (self.mean_keys * before)[..., None, :]
        means = sums / counts.clamp(min=1)[:, None, :, None]
        self.mean_keys = means[..., -1, :]
        return means.to(added.dtype)


class MeanKeyCache:
    assay_states = ()
    is_compileable = False

    def __init__(self, num_layers):
        self.layers = [MeanKeyLayer() for _ in range(num_layers)]

    def get_seq_length(self, layer_idx=0):
        keys = self.layers[layer_idx].keys
        return 0 if keys is None else keys.shape[-2]

    def get_query_offset(self, layer_idx=0):
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length(layer_idx) + query_length, 0

    def update(self, keys, values, layer_idx):
        return self.layers[layer_idx].update(keys, values)


class MeanKeyConfig(LlamaConfig):
    model_type = "llama_mean_keys"


class MeanKeyAttention(LlamaAttention):
    """Adds to each token's output the mean of the keys so far."""

    def forward(self, hidden_states, past_key_values, is_token, counts, **kwargs):
        output, weights = super().forward(hidden_states, past_key_values=past_key_values, **kwargs)
        means = past_key_values.layers[self.layer_idx].update_mean(is_token, counts)
        means = means.repeat_interleave(self.num_key_value_groups, 1)
        return output + means.transpose(1, 2).flatten(2), weights


class LlamaWithMeanKeys(LlamaForCausalLM):
    config_class = MeanKeyConfig

    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = MeanKeyAttention(config, number)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **kwargs):
        if past_key_values is None:
            past_key_values = MeanKeyCache(self.config.num_hidden_layers)
        mask = attention_mask
        if mask is None:
            length = past_key_values.get_seq_length() + input_ids.shape[1]
            mask = input_ids.new_ones(len(input_ids), length)
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            is_token=mask[:, -input_ids.shape[1] :],
            counts=mask.cumsum(1)[:, -input_ids.shape[1] :],
            **kwargs,
        )
'''


def save_model_with_mean_keys(folder: Path) -> Path:
    """Make the model's folder, with its code."""
    return save_own_code(folder, _MODELING, "MeanKeyConfig", "LlamaWithMeanKeys", _SETTINGS)
