"""Models from the hub, without a network: which files are fetched, and errors."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from assay.errors import MachineError
from assay.models import count_parameters, load_model
from assay.models.loading.loaded_model import load_outline
from assay.training.batches import coder_of


class Hub:
    """Fakes of snapshot_download and hf_hub_download, which return one folder."""

    def __init__(self, served: Path, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.asked: list[list[str]] = []

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append(allow_patterns)
        self.folder.mkdir(exist_ok=True)
        for pattern in allow_patterns:
            for file in self.served.glob(pattern):
                shutil.copy(file, self.folder)
        return str(self.folder)

    def hf_hub_download(self, name: str, file: str) -> str:
        self.folder.mkdir(exist_ok=True)
        return str(shutil.copy(self.served / file, self.folder))


@pytest.fixture
def hub(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(llama_folder, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.hf_hub_download)
    return hub


def test_hub_model_loads_as_its_folder_does(hub: Hub) -> None:
    loaded = load_model("owner/tiny", dtype="float32")
    assert loaded.weights_hash == load_model(str(hub.served), dtype="float32").weights_hash
    assert len(hub.asked) == 1


def test_code_is_fetched_only_when_it_is_trusted(hub: Hub) -> None:
    load_model("owner/tiny", dtype="float32")
    load_model("owner/tiny", dtype="float32", remote_code="trust")
    assert ["*.py" in patterns for patterns in hub.asked] == [False, True]


def test_pickled_weights_are_fetched_only_where_there_are_no_others(hub: Hub) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(hub.served / "model.safetensors"), hub.served / "pytorch_model.bin")
    load_model("owner/tiny", dtype="float32")
    assert not (hub.folder / "pytorch_model.bin").exists()
    (hub.served / "model.safetensors").unlink()
    shutil.rmtree(hub.folder)
    load_model("owner/tiny", dtype="float32")
    assert (hub.folder / "pytorch_model.bin").exists()


def test_hub_model_is_sized_by_its_configuration(hub: Hub) -> None:
    assert count_parameters("owner/tiny") == 13520
    assert not (hub.folder / "model.safetensors").exists()


def test_outline_and_batches_need_no_weights(hub: Hub) -> None:
    outline = load_outline("owner/tiny")
    coder = coder_of("owner/tiny")

    assert coder.encode("ab") == outline.encode("ab") != []
    assert sum(one.numel() for one in outline.model.parameters()) == 13520
    assert not (hub.folder / "model.safetensors").exists()


def test_unreachable_hub_is_a_machine_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    for use in (
        lambda: load_model("owner/tiny", dtype="float32"),
        lambda: count_parameters("gpt2"),
    ):
        with pytest.raises(MachineError, match="the hub cannot be reached"):
            use()
