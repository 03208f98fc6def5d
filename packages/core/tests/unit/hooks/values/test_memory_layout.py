import torch

from assay.hooks.values.memory_layout import copy_of, laid_out_as


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def same_place(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    places = [(one.stride(), one.storage_offset()) for one in (actual, expected)]
    return places[0] == places[1]


def test_a_transposed_tensor_stays_transposed() -> None:
    like = torch.zeros(4, 3, 2).transpose(0, 1)
    laid = laid_out_as(values(3, 4, 2), like)
    assert torch.equal(laid, values(3, 4, 2))
    assert same_place(laid, like)


def test_a_view_of_a_larger_tensor_keeps_its_gaps_and_offset() -> None:
    like = torch.zeros(2, 5, 12)[..., 4:8]
    laid = laid_out_as(values(2, 5, 4), like)
    assert torch.equal(laid, values(2, 5, 4))
    assert (laid.stride(), laid.storage_offset()) == ((60, 12, 1), 4)
    # A kernel that ignores strides reads what lies between.
    read = torch.empty(0).set_(laid.untyped_storage(), 4, laid.shape, (20, 4, 1))
    assert not torch.equal(read, laid)


def test_a_large_offset_keeps_its_alignment() -> None:
    like = torch.zeros(5000)[4001:4003]
    assert laid_out_as(values(2), like).storage_offset() == 1024 + 4001 % 64


def test_an_expanded_tensor_stays_expanded_if_its_rows_are_equal() -> None:
    like = torch.zeros(1, 3).expand(4, 3)
    alike, different = values(3).repeat(4, 1), values(4, 3)
    assert same_place(laid_out_as(alike, like), like)
    assert torch.equal(laid_out_as(alike, like), alike)
    assert laid_out_as(different, like) is different


def test_a_value_with_the_layout_or_with_overlaps_is_returned_itself() -> None:
    value = values(4, 2)
    assert laid_out_as(value, torch.zeros(4, 2)) is value
    windows = torch.zeros(5).unfold(0, 2, 1)
    assert laid_out_as(value, windows) is value
    empty = torch.zeros(0, 2)
    assert laid_out_as(empty, torch.zeros(2, 0).t()) is empty


def test_a_copy_has_the_layout_of_the_original_and_may_change() -> None:
    original = torch.zeros(2, 6)[:, 1:3]
    copy = copy_of(original)
    assert same_place(copy, original)
    copy += 1
    assert not original.any()
