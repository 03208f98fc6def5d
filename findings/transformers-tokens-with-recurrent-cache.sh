#!/usr/bin/env bash
# transformers 5.23.0: Mamba, Falcon-Mamba and Jamba ignore the recurrent state of a cache if a call has several tokens.
# No error is raised. A prefill in chunks, the next turn of a chat and assisted decoding make such calls. Mamba-2,
# Falcon-H1 and Granite's hybrid read the state. Pull request 45513 of transformers corrected other families.
#
# Seen with torch 2.13.0, relative error of the logits against one call without a cache:
#   mamba 1.1, falcon_mamba 0.92, jamba 0.35 for 4 tokens at once; at most 1e-6 for 4 tokens one by one
#   falcon_h1, granitemoehybrid, mamba2: at most 1e-6 for both
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
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
CONFIGS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 32,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 4, "n_groups": 1},
}
LOSE_STATE = {"mamba", "falcon_mamba", "jamba"}


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


ids = torch.randint(3, 384, (1, 13), generator=torch.Generator().manual_seed(1))
changed = []
for name, settings in CONFIGS.items():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    errors = []
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 9:]
        for lengths in ((4,), (1, 1, 1, 1)):
            output = model(ids[:, :9], use_cache=True)
            key = "cache_params" if "cache_params" in output else "past_key_values"
            logits = []
            for part in ids[:, 9:].split(lengths, 1):
                output = model(part, use_cache=True, **{key: output[key]})
                logits.append(output.logits)
            errors.append(relative_error(torch.cat(logits, 1), expected))
    print(f"{name}: relative error of the logits of 4 tokens at once {errors[0]:.2g}, one by one {errors[1]:.2g}")
    if (errors[0] > 1e-2) != (name in LOSE_STATE) or errors[1] > 1e-4:
        changed.append(name)
if changed:
    raise SystemExit(f"the behavior changed: {', '.join(changed)}")
PYTHON
