#!/usr/bin/env bash
# transformers 5.23.0: a causal decoder of the BART family with cross-attention computes other logits with a cache than
# without one, from the first step on. `generate` makes a DynamicCache for it, and cross-attention appends the keys of the
# encoder's states to the keys of the text in the same layer. GPT-2 with cross-attention gets a cache with two parts, and
# agrees.
#
# Seen with torch 2.13.0 and transformers 5.23.0, on logits of a standard deviation near 2.4:
#   BartForCausalLM, MBartForCausalLM, PegasusForCausalLM, TrOCRForCausalLM: differences of 2.4 to 11
#   GPT2LMHeadModel: 0
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
TOKENS = {"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    **TOKENS, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128,
    "max_position_embeddings": 128, "init_std": 0.3, "is_decoder": True,
}
GPT2 = {
    **TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3,
    "add_cross_attention": True,
}
MODELS = {
    "BartForCausalLM": transformers.BartConfig(**DECODER),
    "MBartForCausalLM": transformers.MBartConfig(**DECODER),
    "PegasusForCausalLM": transformers.PegasusConfig(**DECODER),
    "TrOCRForCausalLM": transformers.TrOCRConfig(**DECODER),
    "GPT2LMHeadModel": transformers.GPT2Config(**GPT2),
}
torch.manual_seed(0)
ids, states = torch.randint(3, 384, (1, 6)), torch.randn(1, 7, 64)
changed = []
for name, config in MODELS.items():
    model = getattr(transformers, name)(config).eval()
    logits = []
    for use_cache in (True, False):
        result = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), encoder_hidden_states=states,
            max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=use_cache,
            return_dict_in_generate=True, output_logits=True,
        )
        logits.append(result.logits[0])
    difference = float((logits[0] - logits[1]).abs().max())
    print(f"{name}: logits of the first step, standard deviation {logits[1].std():.2f}, differ by {difference:.2g}")
    if (difference > 1) != (name != "GPT2LMHeadModel"):
        changed.append(name)
if changed:
    raise SystemExit(f"the behavior changed: {', '.join(changed)}")
PYTHON
