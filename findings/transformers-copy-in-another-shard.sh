#!/usr/bin/env bash
# transformers 5.23.0 does not ask the index which shard a tensor comes from.
#
# model.safetensors.index.json names one shard for each tensor. If a later shard, by file name, holds a copy of a
# tensor too, `from_pretrained` loads that copy, without a warning. A copy in an earlier shard is ignored. So a folder
# whose shards were merged or written twice loads other weights than its index states, and readers that follow the
# index disagree with transformers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 safetensors==0.8.0

HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=warning "$folder/env/bin/python" - "$folder" <<'PYTHON' | tee "$folder/seen"
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
NAME = "model.layers.0.mlp.up_proj.weight"
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
for place in (0, -1):
    folder = Path(sys.argv[1]) / f"model{place}"
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="4KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(index.values()))
    assert shards[0] != index[NAME] != shards[-1]
    tensors = load_file(folder / shards[place])
    tensors[NAME] = torch.full_like(model.state_dict()[NAME], 7.0)
    save_file(tensors, folder / shards[place], metadata={"format": "pt"})

    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()[NAME]
    is_indexed = torch.equal(loaded, model.state_dict()[NAME])
    where = "last" if place else "first"
    print(f"copy in the {where} shard: loads", "what the index names" if is_indexed else "the copy")
PYTHON

diff "$folder/seen" - <<'SEEN'
copy in the first shard: loads what the index names
copy in the last shard: loads the copy
SEEN
