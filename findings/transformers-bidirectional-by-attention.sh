#!/usr/bin/env bash
# transformers 5.23.0: whether a decoder reads later tokens can depend on the attention implementation and on padding.
# Two settings turn causal attention off: `use_bidirectional_attention` of the Gemma family, which PaliGemma sets itself,
# and `is_causal=False` of every configuration. Without padding, sdpa gets no mask, and the attention module decides. In
# Gemma the module follows the setting and the mask does not; in StableLM and Nemotron the mask follows it and the module
# does not. So a row alone and in a padded batch, or under eager and sdpa, gives other logits, without a warning. Llama,
# the control, follows its setting everywhere.
#
# Seen with torch 2.13.0, whether the tokens before the last one read it:
#                                               eager   sdpa   sdpa, padded
#   gemma      use_bidirectional_attention=True    no    yes             no
#   paligemma  without token_type_ids              no    yes             no
#   stablelm   is_causal=False                    yes     no            yes
#   nemotron   is_causal=False                    yes     no            yes
#   llama      is_causal=False                    yes    yes            yes
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
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32, "vision_use_head": False,
}
SETTINGS = {
    "gemma": {**SIZES, "use_bidirectional_attention": True},
    "paligemma": {
        "text_config": {**SIZES, "model_type": "gemma"}, "vision_config": TOWER, "projection_dim": 32,
        "image_token_index": 7,
    },
    "stablelm": {**SIZES, "is_causal": False},
    "nemotron": {**SIZES, "is_causal": False},
    "llama": {**SIZES, "is_causal": False},
}
EXPECTED = {
    "gemma": (False, True, False),
    "paligemma": (False, True, False),
    "stablelm": (True, False, True),
    "nemotron": (True, False, True),
    "llama": (True, True, True),
}
WHOLE = torch.ones(1, 8, dtype=torch.long)
PADDED = WHOLE.clone()
PADDED[:, :2] = 0


def reads_later_tokens(model, attention, mask):
    """Change the last token. Returns: True if earlier ones notice."""
    model.set_attn_implementation(attention)
    ids = torch.randint(10, 190, (1, 8), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, -1] = 199
    with torch.no_grad():
        first, second = (model(input_ids=one, attention_mask=mask).logits[:, 2:-1] for one in (ids, other))
    return not torch.equal(first, second)


changed = []
for name, settings in SETTINGS.items():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **settings)
    auto = transformers.AutoModelForImageTextToText if name == "paligemma" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    cases = (("eager", WHOLE), ("sdpa", WHOLE), ("sdpa", PADDED))
    seen = tuple(reads_later_tokens(model, attention, mask) for attention, mask in cases)
    print(f"{name}: reads later tokens with eager {seen[0]}, sdpa {seen[1]}, sdpa with padding {seen[2]}")
    if seen != EXPECTED[name]:
        changed.append(name)
if changed:
    raise SystemExit(f"the behavior changed: {', '.join(changed)}")
PYTHON
