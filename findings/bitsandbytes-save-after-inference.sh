#!/usr/bin/env bash
# bitsandbytes 0.50.2 saves wrong scales of 4-bit weights after the first inference on a CPU with AVX512-BF16.
#
# The first call in evaluation mode packs the weights for the CPU and transposes their scales (`absmax`). `state_dict`
# and `save_pretrained` undo the packing of the codes, but neither the transposition nor the rounding to bfloat16. So a
# folder that is saved after a call loads without a warning and computes something else. The model in memory is
# also wrong after `state_dict`. With double quantization (`bnb_4bit_use_double_quant`) only the rounding remains.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet bitsandbytes==0.50.2 transformers==5.23.0 accelerate==1.15.0

HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/env/bin/python" - "$folder" <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import sys

import torch
from bitsandbytes.functional import has_avx512bf16
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
if not has_avx512bf16():
    sys.exit("this CPU has no AVX512-BF16")
folder = sys.argv[1]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{folder}/float")
ids = torch.arange(16)[None]


def load(name, **options):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype="auto", **options).eval()


@torch.no_grad()
def weight(model):
    layer = model.model.layers[0].mlp.up_proj
    return layer(torch.eye(128, dtype=torch.bfloat16)).float()


for is_double in (False, True):
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_double
    )
    model = load("float", quantization_config=settings)
    model.save_pretrained(f"{folder}/before")
    expected = weight(model)
    model.save_pretrained(f"{folder}/after")
    print("double quantization" if is_double else "plain")
    for name, actual in (
        ("saved before a call", weight(load("before"))),
        ("saved after a call", weight(load("after"))),
        ("in memory after saving", weight(model)),
    ):
        error = float((actual - expected).norm() / expected.norm())
        print(f"  {name}: {'equal' if error < 0.005 else f'wrong by {error:.0%}'}")
PYTHON

diff "$folder/seen" - <<'SEEN'
plain
  saved before a call: equal
  saved after a call: wrong by 23%
  in memory after saving: wrong by 23%
double quantization
  saved before a call: equal
  saved after a call: equal
  in memory after saving: equal
SEEN
