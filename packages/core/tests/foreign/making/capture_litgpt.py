"""python -m packages.core.tests.foreign.making.capture_litgpt MODELS TRACES, with litgpt 0.5.13."""

from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file

import assay
from packages.core.tests.foreign.making.inputs import IDS, folders

CONFIG = Config(
    name="micro", block_size=128, vocab_size=128, padded_vocab_size=128, n_layer=2, n_head=4,
    n_embd=64, n_query_groups=2, head_size=16, rotary_percentage=1.0, parallel_residual=False,
    bias=False, norm_class_name="RMSNorm", norm_eps=1e-5, mlp_class_name="LLaMAMLP",
    intermediate_size=96,
)  # fmt: skip

for folder, trace in folders("litgpt", "llama"):
    state: dict[str, Any] = {}
    copy_weights_hf_llama(CONFIG, {}, state, load_file(folder / "model.safetensors"))
    model = GPT(CONFIG).eval()
    model.load_state_dict(state)
    with torch.no_grad(), assay.capture(model, trace):
        model(IDS)
