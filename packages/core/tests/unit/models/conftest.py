"""A Hugging Face folder small enough to write for every test."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from assay.models.transformers_calls import quiet_transformers

EditTensors = Callable[[Mapping[str, torch.Tensor | None]], None]
EditConfig = Callable[..., None]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "llama"
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with quiet_transformers():
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved_llama, tmp_path / "llama"))


@pytest.fixture
def edit_tensors(llama_folder: Path) -> EditTensors:
    """Replaces stored tensors of `llama_folder`; None drops one."""

    def edit(changes: Mapping[str, torch.Tensor | None]) -> None:
        file = llama_folder / "model.safetensors"
        tensors = {**load_file(file), **changes}
        kept = {name: value for name, value in tensors.items() if value is not None}
        save_file(kept, file, metadata={"format": "pt"})

    return edit


@pytest.fixture
def edit_config(llama_folder: Path) -> EditConfig:
    """Changes settings in config.json of `llama_folder`."""

    def edit(**settings: Any) -> None:
        path = llama_folder / "config.json"
        record = json.loads(path.read_text(encoding="utf-8")) | settings
        path.write_text(json.dumps(record), encoding="utf-8")

    return edit
