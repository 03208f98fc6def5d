import torch

from assay.training.state.parameters import in_blocks


def test_blocks_hold_all_elements_once_in_the_order_of_both_tensors() -> None:
    first = torch.arange(3 * 50_000).reshape(3, 50_000)
    second = -first

    parts = list(in_blocks(first, second))

    assert [len(one) for one, _ in parts] == [65_536, 65_536, 18_928]
    assert torch.equal(torch.cat([one for one, _ in parts]), first.flatten())
    assert all(torch.equal(one, -other) for one, other in parts)


def test_blocks_of_a_transposed_tensor_fit_those_of_a_contiguous_one() -> None:
    turned = torch.arange(300_000).reshape(1000, 300).T
    whole = turned.contiguous()

    assert all(torch.equal(one, other) for one, other in in_blocks(turned, whole))


def test_writing_into_blocks_changes_a_contiguous_tensor() -> None:
    target = torch.zeros(2, 40_000)

    for (block,) in in_blocks(target):
        block.fill_(1.0)

    assert int(target.sum()) == 80_000


def test_tensors_of_one_or_no_element_are_one_block() -> None:
    assert [one.tolist() for (one,) in in_blocks(torch.tensor(2.5))] == [[2.5]]
    assert [one.tolist() for (one,) in in_blocks(torch.empty(0))] == [[]]
