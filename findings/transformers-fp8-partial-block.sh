#!/usr/bin/env bash
# transformers 5.23.0 dequantizes fp8 weights with blocks whose size it derives from the number of scales.
#
# config.json states `weight_block_size` [64, 64]. A weight of 96 x 64 has a whole block and a half, so 2 scales.
# On a CPU `from_pretrained` divides 96 rows by 2 scales and applies the first scale to 48 rows instead of 64,
# without a warning. Models whose sizes are multiples of the block load correctly.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 accelerate==1.15.0

HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/env/bin/python" - "$folder" <<'PYTHON' | tee "$folder/seen"
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
print("transformers", transformers.__version__)
NAME, BLOCK = "model.layers.0.mlp.up_proj.weight", 64
for rows in (128, 96):
    folder = Path(sys.argv[1]) / f"model-{rows}"
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=rows, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        shape = tensors[name].shape
        scales = 1.0 + torch.arange(-(-shape[0] // BLOCK))[:, None].repeat(1, -(-shape[1] // BLOCK))
        tensors[name] = torch.ones(shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]
    }
    (folder / "config.json").write_text(json.dumps(settings))

    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()[NAME]
    first = int((loaded[:, 0] == 1).sum())
    print(f"{rows} rows in blocks of {BLOCK}: the first scale is applied to {first} rows")
PYTHON

diff "$folder/seen" - <<'SEEN'
transformers 5.23.0
128 rows in blocks of 64: the first scale is applied to 64 rows
96 rows in blocks of 64: the first scale is applied to 48 rows
SEEN
