#!/usr/bin/env bash
# transformers 5.23.0: Zamba2 and Nemotron-H bound the time step of their recurrence by `time_step_min` in the prefill,
# and not in a decode step. With a cache, generation therefore computes other logits than one call over the same text,
# in every dtype. Both configurations have a bound of 0.001 by default; Mamba-2 has none.
#
# Seen with torch 2.13.0, largest relative error of the logits in float64:
#   zamba2 1.7e-3, nemotron_h 8.2e-4; without the bound 3.4e-6 and 2.0e-7, because parts compute in float32
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
CONFIGS = {
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_d_state": 8, "mamba_headdim": 8,
        "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "head_dim": 8,
    },
}


def largest_error(name, settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(3, 384, (1, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        output = model(ids[:, :9], use_cache=True)
        errors = []
        for position in range(9, 13):
            output = model(ids[:, position : position + 1], use_cache=True, past_key_values=output.past_key_values)
            wanted = expected[:, position]
            errors.append(float((output.logits[:, 0] - wanted).norm() / wanted.norm()))
    return max(errors)


changed = []
for name, settings in CONFIGS.items():
    bounded = largest_error(name, settings)
    free = largest_error(name, {**settings, "time_step_min": 1e-20})
    print(f"{name}: largest relative error of a decode step {bounded:.2g}, without a lower bound {free:.2g}")
    if bounded < 1e-4 or free > 1e-5:
        changed.append(name)
if changed:
    raise SystemExit(f"the behavior changed: {', '.join(changed)}")
PYTHON
