#!/usr/bin/env bash
# transformers 5.23.0: a forward call of Bamba with a cache and without `position_ids` counts positions from 0 again. Its
# attention then rotates the new keys as if they began the text, without an error. Llama counts from the length of the
# cache. `generate` passes `position_ids`, so only direct calls are wrong.
#
# Seen with torch 2.13.0, relative error of the logits after 9 cached tokens: 0.16 without position_ids, 9e-7 with them
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
torch.manual_seed(0)
config = transformers.BambaConfig(
    vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, pad_token_id=0,
)
model = transformers.BambaForCausalLM(config).eval()
for parameter in model.parameters():
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=0.3)
ids = torch.randint(3, 384, (1, 10), generator=torch.Generator().manual_seed(1))
errors = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, 9]
    for name, given in (("none", {}), ("position_ids", {"position_ids": torch.tensor([[9]])})):
        cache = model(ids[:, :9], use_cache=True).past_key_values
        actual = model(ids[:, 9:], past_key_values=cache, **given).logits[:, 0]
        errors[name] = float((actual - expected).norm() / expected.norm())
        print(f"positions given as {name}: relative error of the logits after 9 cached tokens {errors[name]:.2g}")
if errors["none"] < 1e-2 or errors["position_ids"] > 1e-4:
    raise SystemExit("the behavior changed")
PYTHON
