"""Weights of a Hugging Face model folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from assay.dumps.protocol import Dump, DumpError
from assay.dumps.recognizing import open_dump
from assay.files import UnreadableFileError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def write_shards(folder: Path, **shards: dict[str, torch.Tensor]) -> None:
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        save_file(tensors, folder / f"{file}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{file}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def weights(dump: Dump) -> dict[str, object]:
    return {f"{one.site.at.module}:{one.site.port}": one.read().tolist() for one in dump.tensors}


def test_weights_of_all_shards_are_read(folder: Path) -> None:
    write_shards(
        folder,
        one={"model.norm.weight": torch.tensor([1.0])},
        two={"lm_head.weight": torch.tensor([[2.0]]), "scale": torch.tensor([3.0])},
    )
    dump = open_dump(folder)
    assert dump.format == "model"
    assert weights(dump) == {
        "model.norm:parameter.weight": [1.0],
        "lm_head:parameter.weight": [[2.0]],
        ":parameter.scale": [3.0],
    }
    assert [one.key for one in dump.tensors] == ["model.norm.weight", "lm_head.weight", "scale"]


def test_dtype_and_shape_are_known_before_reading(folder: Path) -> None:
    save_file({"a.bias": torch.zeros(2, 3, dtype=torch.bfloat16)}, folder / "model.safetensors")
    (only,) = open_dump(folder).tensors
    assert (only.dtype, only.shape, only.has_values) == ("bfloat16", (2, 3), True)


def test_pickled_weights_are_read(folder: Path) -> None:
    torch.save({"a.weight": torch.tensor([4.0])}, folder / "pytorch_model.bin")
    dump = open_dump(folder)
    assert weights(dump) == {"a:parameter.weight": [4.0]}
    assert (dump.tensors[0].dtype, dump.tensors[0].shape) == ("float32", (1,))


def test_one_weight_is_read_without_the_others(folder: Path) -> None:
    """The file is sparse: 64 GB are claimed, and only the pages that are used are read."""
    entry = {"dtype": "F32", "shape": [1 << 34], "data_offsets": [0, 1 << 36]}
    last = {"dtype": "F32", "shape": [1], "data_offsets": [1 << 36, (1 << 36) + 4]}
    header = json.dumps({"a.weight": entry, "b.weight": last}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 36) + 4)
    dump = open_dump(folder)
    assert dump.tensors[1].read().tolist() == [0.0]


def test_configuration_alone_is_not_a_model(folder: Path) -> None:
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(folder)


@pytest.mark.parametrize("copy", [1.0, 0.0])
def test_a_weight_that_differs_in_another_shard_forbids_a_pass(folder: Path, copy: float) -> None:
    write_shards(
        folder, one={"a": torch.zeros(1)}, two={"a": torch.tensor([copy]), "b": torch.ones(1)}
    )
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    dump = open_dump(folder)
    assert {one.key: one.read().tolist() for one in dump.tensors} == {"a": [0.0], "b": [1.0]}
    text = "two.safetensors holds another a than the one that the index assigns"
    assert list(dump.problems) == ([text] if copy else [])


def test_shard_that_is_missing_is_named(folder: Path) -> None:
    write_shards(folder, one={"a": torch.zeros(1)}, two={"b": torch.zeros(1)})
    (folder / "two.safetensors").unlink()
    with pytest.raises(UnreadableFileError, match=r"names two\.safetensors, which is not there"):
        open_dump(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "link.safetensors"])
def test_shard_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    (folder / "link.safetensors").symlink_to("../secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises((DumpError, UnreadableFileError)):
        open_dump(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]"])
def test_damaged_shard_is_one_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises((DumpError, UnreadableFileError), match=r"model\.safetensors"):
        open_dump(folder)


def test_shard_that_shrinks_after_opening_is_one_error(folder: Path) -> None:
    save_file({"a": torch.zeros(1000)}, folder / "model.safetensors")
    dump = open_dump(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UnreadableFileError, match=r"model\.safetensors: a: "):
        dump.tensors[0].read()
