#!/usr/bin/env bash
# transformers 5.23.0 refuses asymmetric compressed-tensors folders, unless it dequantizes them.
#
# compressed-tensors packs zero points of 4 bits, eight to a word. The model that transformers prepares expects one row of
# zero points for each output, so every weight_zero_point has another shape than stored, and `from_pretrained` raises an
# error. transformers 5.17.0 loads such folders. With `dequantize=True`, 5.23.0 loads them too. Symmetric folders have
# no zero points and load.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet transformers==5.23.0 compressed-tensors==0.20.1 accelerate==1.15.0

HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import sys
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config,
)
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
}
for is_symmetric in (True, False):
    folder = f"{sys.argv[1]}/symmetric-{is_symmetric}"
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    weights = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=is_symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen", format="pack-quantized"
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, 32)).float()
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = torch.maximum(-low, high) / 7.5 if is_symmetric else (high - low) / 15
            module.weight_scale.data.copy_(scale)
            if not is_symmetric:
                module.weight_zero_point.data.copy_((-8 - low / module.weight_scale.float()).round().clamp(-8, 7))
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    kind = "symmetric" if is_symmetric else "asymmetric"
    for is_dense in (False, True):
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_dense else {}
        try:
            AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
            outcome = "loads"
        except RuntimeError:
            outcome = "is refused"
        print(f"{kind}{', dequantize=True' if is_dense else ''}: {outcome}")
PYTHON

diff "$folder/seen" - <<'SEEN'
symmetric: loads
symmetric, dequantize=True: loads
asymmetric: is refused
asymmetric, dequantize=True: loads
SEEN
