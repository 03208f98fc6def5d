#!/usr/bin/env bash
# transformers 5.23.0 masks the same tokens in every epoch if a seeded collator runs in workers of a DataLoader.
#
# `DataCollatorForLanguageModeling(mlm=True, seed=0)` seeds its generator from the seed and the number of the worker when
# a worker first calls it. A DataLoader starts new workers for each epoch, so the masks of epoch 0 return: the model
# never predicts the other 85 % of the tokens. Without workers, or with `persistent_workers=True`, epochs differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0

HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

words = {f"w{number}": number for number in range(100)} | {"[PAD]": 100, "[MASK]": 101}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="[PAD]", mask_token="[MASK]"
)
rows = [{"input_ids": [(7 * row + column) % 100 for column in range(64)]} for row in range(8)]
for options in ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}):
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, seed=0)
    loader = DataLoader(rows, batch_size=4, collate_fn=collator, **options)
    epochs = [torch.cat([batch["labels"] != -100 for batch in loader]) for _ in range(3)]
    is_repeated = all(torch.equal(epoch, epochs[0]) for epoch in epochs[1:])
    given = ", ".join(f"{name}={value}" for name, value in options.items()) or "no workers"
    print(f"{given}: {'the same masks in 3 epochs' if is_repeated else 'other masks in each epoch'}")
PYTHON

diff "$folder/seen" - <<'SEEN'
no workers: other masks in each epoch
num_workers=2: the same masks in 3 epochs
num_workers=2, persistent_workers=True: other masks in each epoch
SEEN
