"""The cost of loading a model and comparing it with its files, beside reading the files."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.models import load_model
from assay.models.inspect.inspection import inspect_load
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import median_ratio, take_turns

ROUNDS = 3

# At no less than half the speed of reading the files twice.
LIMIT = 2.0


def test_loading_and_comparing_costs_at_most_four_reads(
    new_folder: Callable[[], Path], table: Table
) -> None:
    folder = new_folder()
    _write_gigabyte(folder)
    file = folder / "model.safetensors"

    def read_twice() -> None:
        for _ in range(2):
            file.read_bytes()

    def load_and_compare() -> None:
        loaded = load_model(str(folder), dtype="bfloat16")
        report = inspect_load(loaded, "refuse").report
        assert report.compared
        assert not report.weights

    load_and_compare()  # imports
    times = take_turns({"read": read_twice, "load": load_and_compare}, ROUNDS)
    table.at_most(
        "loading, and comparing with the files", median_ratio(times["load"], times["read"]), LIMIT,
        f"reading the files twice ({file.stat().st_size / 2**20:.0f} MiB)",
    )  # fmt: skip


def _write_gigabyte(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape[-1]))
    model.save_pretrained(folder)
