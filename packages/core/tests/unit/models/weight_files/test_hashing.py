"""Hashes of a model's weights."""

import torch
from torch import nn

from assay.models.weight_files.hashing import combine_hashes, weight_hashes


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
