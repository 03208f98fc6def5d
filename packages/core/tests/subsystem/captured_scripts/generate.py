"""`model.generate` on prompts of different lengths, greedy and sampled."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config).eval()
if os.environ.get("FAULT"):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1.01
prompts = torch.tensor([[0, 0, 5, 9, 11], [3, 17, 8, 40, 2]])
for samples in (False, True):
    torch.manual_seed(1)
    model.generate(
        prompts, attention_mask=(prompts != 0).long(), max_new_tokens=6, do_sample=samples,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
