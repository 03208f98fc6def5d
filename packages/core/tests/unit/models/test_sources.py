"""What a MODEL argument names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from socket import gaierror
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from assay.errors import MachineError, UsageError
from assay.models import count_parameters, load_model, resolve_model
from assay.models.load import load_outline
from assay.models.sources import hash_files, require_model
from assay.training.batches import coder_of


def test_recipe_is_trained_by_default() -> None:
    source = resolve_model("micro:llama")
    assert (source.kind, source.trained, source.seed) == ("micro", True, 0)
    assert source.recipe is not None
    assert source.recipe.name == "llama"


def test_untrained_recipe_takes_a_seed() -> None:
    source = resolve_model("micro:bert?trained=0&seed=17")
    assert (source.trained, source.seed) == (False, 17)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("micro:lama", "unknown recipe 'lama'; did you mean llama?"),
        ("micro:", "unknown recipe ''; known: llama, mistral"),
        ("micro:llama?size=9", "unknown option 'size'"),
        ("micro:llama?trained", "trained=0|1"),
        ("micro:llama?trained=yes", "trained=0|1"),
        ("micro:llama?trained=0&seed=-1", "seed=N"),
        ("micro:llama?seed=1", "a seed needs trained=0"),
        ("./nowhere", "no such folder"),
        ("/nowhere", "no such folder"),
        ("a/b/c", "no such folder"),
        ("", "no such folder"),
    ],
)
def test_unknown_model_is_a_usage_error(reference: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(reference)
    assert message in str(caught.value)


def test_folder_is_found_by_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).folder == tmp_path


def test_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(file))


def test_gguf_file_without_its_package_names_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("assay.models.gguf_files.find_spec", lambda _: None)
    message = r"^model.gguf: the package gguf is not installed: pip install 'assay-core\[gguf\]'$"
    for reference in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(UsageError, match=message):
            resolve_model(str(reference))


def test_reference_that_is_neither_recipe_nor_folder_may_be_a_hub_name() -> None:
    source = resolve_model("some-owner/some.model-7B")
    assert (source.kind, source.folder, source.recipe) == ("hub", None, None)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ((), "there is no folder models/lama; models has no folders"),
        ((".git",), "there is no folder models/lama; models has no folders"),
        (("llama", "gemma"), "there is no folder models/lama; models has: gemma, llama"),
        (
            tuple("gfedcba"),
            "there is no folder models/lama; models has: a, b, c, d, e and 2 more",
        ),
    ],
    ids=["empty", "hidden", "two", "seven"],
)
def test_mistyped_folder_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models/README.md").touch()
    with pytest.raises(UsageError) as caught:
        resolve_model("models/lama")
    assert str(caught.value) == message


def test_file_called_like_an_owner_leaves_the_hub_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-owner").touch()
    assert resolve_model("some-owner/some.model-7B").kind == "hub"
    assert resolve_model("gpt2").kind == "hub"


def test_resolving_loads_no_torch() -> None:
    code = (
        "import sys, assay.models, assay.inputs; assay.models.resolve_model('micro:llama');"
        " sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read: No such file"):
        resolve_model(str(tmp_path))


def test_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"config\.json: it is a folder, not a file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("denied", ["config.json", "model.safetensors", "tokenizer.json"])
def test_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)).folder == tmp_path.resolve()
    really_open = os.open

    def open_unless_denied(path: Path, *arguments: Any) -> Any:  # root may open every file
        if path.name == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", open_unless_denied)
    with pytest.raises(UsageError, match=f"{denied}: cannot be read: Permission denied"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "merges.txt", "model.safetensors"]
)
def test_file_that_never_ends_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=f"{name}: it is a FIFO, a socket or a device"):
        resolve_model(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"{name}: it is a FIFO, a socket or a device"):
        resolve_model(str(tmp_path))


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
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", str)
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
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    for use in (
        lambda: load_model("owner/tiny", dtype="float32"),
        lambda: count_parameters("gpt2"),
    ):
        with pytest.raises(MachineError, match="the hub cannot be reached"):
            use()


def test_unknown_host_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look_up(_: str) -> None:
        cause = gaierror(-2, "Name or service not known")
        raise RuntimeError("as the hub's library raises it") from cause

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", look_up)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, _: asked.append(name))
    with pytest.raises(MachineError, match=r"'nosuch': no such folder here.* cannot be reached"):
        require_model("nosuch")
    assert asked == []


def test_hash_of_a_folder_depends_on_names_and_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(b"one")
    source = resolve_model(str(tmp_path))
    hashes = [hash_files(source, "refuse")]
    weights.write_bytes(b"two")
    hashes.append(hash_files(source, "refuse"))
    weights.rename(tmp_path / "other.safetensors")
    hashes.append(hash_files(source, "refuse"))

    assert len(set(hashes)) == 3
