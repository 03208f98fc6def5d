"""Weight files: damage is named by file and key before anything is loaded."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from assay.errors import UsageError
from assay.models.stored_tensors import describe_stale_copies, map_folder, pickled_weights
from assay.models.weight_files import (
    checkpoint_dtype,
    combine_hashes,
    holds_float64,
    read_tensors,
    stored_weights,
    weight_files,
    weight_hashes,
)


def read(folder: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    tensors = read_tensors(folder)
    assert tensors is not None
    return sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def hash_of(folder: Path) -> str:
    tensors = read_tensors(folder)
    assert tensors is not None
    return combine_hashes({name: one.hash for name, one in stored_weights(tensors).items()})


def write_sharded(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    folder.mkdir()
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"model-{number}.safetensors"
        save_file(shard, folder / name)
        places |= dict.fromkeys(shard, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))


def test_headers_give_names_dtypes_and_shapes(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(5, dtype=torch.int8)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert read(tmp_path) == [("a", "BF16", (2, 3)), ("b", "I8", (5,))]


def test_cut_file_is_refused_by_the_first_tensor_that_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"first": torch.zeros(4), "second": torch.zeros(4)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"model\.safetensors is truncated: second ends at byte"):
        read_tensors(tmp_path)


def header_of(shape: str) -> bytes:
    text = f'{{"a": {{"dtype": "F32", {shape}, "data_offsets": [0, 4]}}}}'.encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x07", "truncated"),
        (struct.pack("<Q", 2**62), "truncated"),
        (struct.pack("<Q", 9) + b"{}", "truncated"),
        (struct.pack("<Q", 2) + b"{[", "safetensors header: not JSON"),
        (
            struct.pack("<Q", 4002) + b"[" * 2001 + b"]" * 2001,
            "header: not JSON: nested deeper than 100",
        ),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "header: not JSON: nested deeper than 100"),
        (header_of('"shape": [Infinity]'), "broken safetensors header.*inf is neither a size"),
        (header_of('"shape": [2]'), "a has 4 bytes for 2 values of F32"),
        (header_of('"shape": [1, 0]'), "a has 4 bytes for 0 values of F32"),
        (header_of('"shape": [1.5]'), "broken safetensors header"),
        (header_of('"shape": [true]'), "broken safetensors header"),
        (header_of(f'"shape": [{"9" * 5000}]'), "header: not JSON: Exceeds the limit"),
        (struct.pack("<Q", 2) + b"[]", "broken safetensors header"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "broken safetensors header"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_tensors(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_tensor_that_overlaps_the_header_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}).encode()
    content = struct.pack("<Q", len(header)) + header
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="-4 is neither a size nor an offset"):
        read_tensors(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no weights: neither model\.safetensors nor"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model-0.safetensors"])
def test_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    if name == "model-0.safetensors":
        write_sharded(folder, [{"a": torch.zeros(1)}])
    else:
        folder.mkdir()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(UsageError) as caught:
        weight_files(folder)
    assert str(caught.value) == (
        f"{folder / name} is a pointer of Git LFS, not the weights; to load them: git lfs pull"
    )


def test_absent_shard_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_sharded(folder, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match=r"names model-1\.safetensors, which is not there"):
        read_tensors(folder)


def test_shard_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_sharded(folder, [{"a": torch.zeros(1)}])
    (folder / "model-0.safetensors").rename(tmp_path / "model-0.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model-0.safetensors"}}))
    with pytest.raises(UsageError, match="which is not there"):
        read_tensors(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model-0.safetensors"])
def test_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    write_sharded(folder, [{"a": torch.zeros(1)}])
    (folder / "model-0.safetensors").rename(tmp_path / "outside")
    (folder / name).symlink_to("../outside")
    with pytest.raises(UsageError, match=rf"{name} is a symbolic link out of its folder, to"):
        read_tensors(folder)


def test_links_within_a_folder_and_a_hub_cache_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "1234"
    folder.parent.mkdir()
    write_sharded(folder, [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])
    (tmp_path / "blobs").mkdir()
    (folder / "model-0.safetensors").rename(tmp_path / "blobs" / "5678")
    (folder / "model-0.safetensors").symlink_to("../../blobs/5678")
    (folder / "model-1.safetensors").rename(folder / "kept")
    (folder / "model-1.safetensors").symlink_to("kept")
    assert [one.name for one in read_tensors(folder) or []] == ["a", "b"]


@pytest.mark.parametrize(
    "shards", ["[]", "{}", '{"a": 1}', '{"a": ["x"]}', '{"a": null}', f'{{"a": "{"x" * 5000}"}}']
)
def test_index_of_another_form_is_refused(tmp_path: Path, shards: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {shards}}}')
    with pytest.raises(UsageError, match=r"has no weight_map|which is not there"):
        read_tensors(tmp_path)


def test_tensor_that_the_index_promises_and_no_shard_holds_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_sharded(folder, [{"a": torch.zeros(1)}])
    index = folder / "model.safetensors.index.json"
    places = {"a": "model-0.safetensors", "b": "model-0.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UsageError, match=r"model-0\.safetensors lacks b"):
        read_tensors(folder)


def write_two_copies(folder: Path, suffix: str, assigned: int, other: torch.Tensor) -> Path:
    """Two shards hold `a`, ones and `other`; the index names the shard `assigned`."""
    folder.mkdir()
    kind = "model" if suffix == "safetensors" else "pytorch_model"
    shards = [{"a": torch.ones(2, 3), "e": torch.zeros(1)}, {"a": other, "b": torch.zeros(1)}]
    for number, shard in enumerate(shards):
        file = folder / f"{kind}-{number}.{suffix}"
        save_file(shard, file) if suffix == "safetensors" else torch.save(shard, file)
    places = {"a": f"{kind}-{assigned}.{suffix}", "b": f"{kind}-1.{suffix}"}
    places["e"] = f"{kind}-0.{suffix}"
    (folder / f"{kind}.{suffix}.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("assigned", "other", "value", "stale"),
    [
        (0, torch.full((2, 3), 2.0), 1.0, 1),
        (1, torch.full((2, 3), 2.0), 2.0, 0),
        (0, torch.ones(3, 2), 1.0, 1),  # the same bytes in another shape
        (0, torch.ones(2, 3), 1.0, None),  # an equal copy
    ],
)
def test_a_tensor_comes_from_the_shard_that_the_index_names(
    tmp_path: Path, suffix: str, assigned: int, other: torch.Tensor, value: float, stale: int | None
) -> None:
    folder = write_two_copies(tmp_path / "model", suffix, assigned, other)
    assert map_folder(folder)["a"].unique().tolist() == [value]
    kind = "model" if suffix == "safetensors" else "pytorch_model"
    problem = f"{kind}-{stale}.{suffix} holds another a than the one that the index assigns"
    assert describe_stale_copies(folder) == ([] if stale is None else [problem])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"b": 1, "c": 0}, "lacks c, which .* promises"),
        ({"b": 1, "d": 0, "a": 0}, "lacks d, which .* promises"),
        ({"b": 1, "x": 0}, "lacks x, which"),
    ],
)
def test_an_index_that_promises_too_much_is_refused(
    tmp_path: Path, suffix: str, places: dict[str, int], message: str
) -> None:
    folder = write_two_copies(tmp_path / "model", suffix, 0, torch.zeros(2, 3))
    index = next(folder.glob("*.index.json"))
    kind = index.name.partition(".")[0]
    named = {name: f"{kind}-{number}.{suffix}" for name, number in places.items()}
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(UsageError, match=message):
        map_folder(folder)


def test_two_copies_of_which_the_index_names_none_are_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path / "model", [{"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "c": torch.ones(1)}])  # fmt: skip
    index = tmp_path / "model" / "model.safetensors.index.json"
    places = {"a": "model-0.safetensors", "c": "model-1.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UsageError, match="does not name b, which two shards hold"):
        read_tensors(tmp_path / "model")


def test_hash_does_not_depend_on_the_split_over_files(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(3)
    write_sharded(tmp_path / "two", [{"b": b}, {"a": a}])
    (tmp_path / "one").mkdir()
    save_file({"a": a, "b": b}, tmp_path / "one" / "model.safetensors")
    assert hash_of(tmp_path / "one") == hash_of(tmp_path / "two")


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([[1.0, 2.0]])},  # another shape
        {"b": torch.tensor([1.0, 2.0])},  # another name
        {"a": torch.tensor([1.0, 2.0000002])},  # another value
        {"a": torch.tensor([1.0, 2.0]).view(torch.int32)},  # the same bytes as another dtype
    ],
    ids=["shape", "name", "value", "dtype"],
)
def test_hash_differs_where_the_weights_do(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    for name, tensors in (("this", {"a": torch.tensor([1.0, 2.0])}), ("other", other)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert hash_of(tmp_path / "this") != hash_of(tmp_path / "other")


def test_dtype_is_that_of_most_values_not_of_most_tensors(tmp_path: Path) -> None:
    tensors = {
        "large": torch.zeros(100, dtype=torch.bfloat16),
        "norm.0": torch.zeros(10),
        "norm.1": torch.zeros(10),
        "ids": torch.zeros(1000, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_tensors(tmp_path)
    assert stored is not None
    assert checkpoint_dtype(stored) == "bfloat16"
    assert not holds_float64(stored)


def test_a_pickled_checkpoint_holds_the_same_weights(tmp_path: Path) -> None:
    state = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor([True, False]),
        "c": torch.arange(4.0),
    }
    save_file(state, tmp_path / "model.safetensors")
    tensors = read_tensors(tmp_path)
    assert tensors is not None
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(state, pickled / "pytorch_model.bin")

    assert pickled_weights(pickled) == stored_weights(tensors)
    assert pickled_weights(pickled)["a"].shape == (2, 3)


def linear() -> nn.Linear:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).reshape(2, 3))
        module.bias.zero_()
    return module


def test_equal_values_have_equal_hashes() -> None:
    assert weight_hashes(linear()) == weight_hashes(linear())


def test_one_changed_bit_changes_its_tensor_and_the_whole() -> None:
    before, changed = weight_hashes(linear()), linear()
    with torch.no_grad():
        changed.bias[1] = -0.0
    after = weight_hashes(changed)
    assert before["weight"] == after["weight"]
    assert before["bias"] != after["bias"]
    assert combine_hashes(before) != combine_hashes(after)


def test_transposed_view_hashes_like_its_copy() -> None:
    module = linear()
    module.weight = nn.Parameter(module.weight.detach().t())
    copy = linear()
    copy.weight = nn.Parameter(module.weight.detach().contiguous())
    assert weight_hashes(module)["weight"] == weight_hashes(copy)["weight"]


def test_every_second_element_hashes_like_its_copy() -> None:
    module, copy = nn.Module(), nn.Module()
    module.register_buffer("strided", torch.arange(6.0)[::2])
    copy.register_buffer("strided", torch.tensor([0.0, 2.0, 4.0]))
    assert weight_hashes(module) == weight_hashes(copy)


def test_shape_and_dtype_count() -> None:
    hashes = {
        weight_hashes(nn.ParameterList([value]))["0"]
        for value in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(8, dtype=torch.bfloat16))
    }
    assert len(hashes) == 3


def test_tied_weights_and_buffers_are_listed_under_every_name() -> None:
    module = nn.ModuleDict({"embed": linear(), "head": linear(), "norm": nn.BatchNorm1d(2)})
    module["head"].weight = module["embed"].weight
    hashes = weight_hashes(module)
    assert hashes["head.weight"] == hashes["embed.weight"]
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= hashes.keys()


def test_empty_and_scalar_tensors_have_hashes() -> None:
    module = nn.Module()
    module.register_buffer("empty", torch.zeros(0, 3))
    module.register_buffer("scalar", torch.tensor(1.0))
    assert len(set(weight_hashes(module).values())) == 2


def test_combined_hash_does_not_depend_on_order() -> None:
    assert combine_hashes({"a": "1", "b": "2"}) == combine_hashes({"b": "2", "a": "1"})
    assert combine_hashes({"a": "1", "b": "2"}) != combine_hashes({"a": "2", "b": "1"})
