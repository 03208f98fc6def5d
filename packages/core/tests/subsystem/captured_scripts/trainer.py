"""Hugging Face `Trainer` with its defaults: AdamW, clipping at 1.0."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (number + 3)) % 64
        return {"input_ids": ids, "labels": ids}


set_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config)
if os.environ.get("FAULT"):
    # Large enough that clipping changes all other gradients, too.
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 20)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Rows()).train()
