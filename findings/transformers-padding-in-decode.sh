#!/usr/bin/env bash
# transformers 5.23.0: in a padded batch, the decode steps of GIT without images and of Kosmos-2.5 are wrong; the prefill,
# and so the first new token, is right. GIT widens the mask of a decode step by the columns of an image although the cache
# holds none, which uncovers padding. Kosmos-2.5 counts the positions of a decode step from the length of the cache, with
# padding, and those of the prefill without. The same text alone, and GPT-NeoX, the control, agree in every step.
#
# Seen with torch 2.13.0, relative error of the logits of each of four steps, against the same text alone, in float64:
#   git 0, 0.62, 0.73, 0.84   kosmos-2.5 0, 0.46, 0.41, 0.83   gpt_neox 0 in all
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
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}
CONFIGS = {
    "git": transformers.GitConfig(vision_config=TOWER, **SIZES),
    "kosmos-2.5": transformers.Kosmos2_5Config(
        text_config={
            "vocab_size": 200, "embed_dim": 32, "ffn_dim": 64, "layers": 2, "attention_heads": 2, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "head_dim": 16, "patch_embed_hidden_size": 32,
        },
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
}
CLASSES = {
    "git": transformers.GitForCausalLM,
    "kosmos-2.5": transformers.Kosmos2_5ForConditionalGeneration,
    "gpt_neox": transformers.GPTNeoXForCausalLM,
}


def logits_of_first_row(model, ids, forced):
    """Return the logits of each step, (N, V), while `forced` (N) are the tokens that the first row gets."""

    def allow(row, sequence):
        return [int(forced[len(sequence) - ids.shape[1]])]

    with torch.no_grad():
        output = model.generate(
            input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=len(forced), do_sample=False,
            prefix_allowed_tokens_fn=allow, output_logits=True, return_dict_in_generate=True,
        )
    return torch.stack([step[0] for step in output.logits])


long, forced = (torch.randint(10, 190, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 4))
short = torch.cat([torch.zeros(4, dtype=torch.long), long[:5]])
changed = []
for name, config in CONFIGS.items():
    torch.manual_seed(0)
    model = CLASSES[name](config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    alone = logits_of_first_row(model, short[None, 4:], forced)
    padded = logits_of_first_row(model, torch.stack([short, long]), forced)
    errors = ((padded - alone).norm(dim=-1) / alone.norm(dim=-1)).tolist()
    print(f"{name}: relative error of each step {', '.join(f'{error:.2g}' for error in errors)}")
    is_wrong = [error > 1e-5 for error in errors]
    if is_wrong != [False, *[name != "gpt_neox"] * 3]:
        changed.append(name)
if changed:
    raise SystemExit(f"the behavior changed: {', '.join(changed)}")
PYTHON
