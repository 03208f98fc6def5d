from itertools import chain
from typing import get_args

import pytest
import torch

from assay.errors import UsageError
from assay.training.batches import (
    TextCoder,
    check_batch,
    coder_of,
    count_label_tokens,
    training_batches,
)
from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, Shapes

PAD = 258
CODER = TextCoder(lambda text: list(text.encode()), PAD)


def rows_of(micro_batch: MicroBatch) -> list[list[int]]:
    """Ids of each row without its padding."""
    pairs = zip(micro_batch["input_ids"], micro_batch["attention_mask"], strict=True)
    return [ids[mask == 1].tolist() for ids, mask in pairs]


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_have_unequal_label_counts_and_padding(seed: int) -> None:
    batches = training_batches(CODER, steps=3, micro_batches=3, seed=seed)
    assert [len(step) for step in batches] == [3, 3, 3]
    for step in batches:
        assert len({count_label_tokens(micro_batch) for micro_batch in step}) == 3
        assert any((micro_batch["attention_mask"] == 0).any() for micro_batch in step)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_a_micro_batch_differ_in_their_beginnings_and_lengths(seed: int) -> None:
    for micro_batch in chain(*training_batches(CODER, steps=3, micro_batches=4, seed=seed)):
        rows = rows_of(micro_batch)
        assert len({tuple(row[:8]) for row in rows}) == len(rows)
        assert len(set(map(len, rows))) == len(rows)


def test_text_that_is_one_token_alone_is_taken_as_it_is() -> None:
    coder = TextCoder(lambda text: [0] * len(text), PAD)
    (step,) = training_batches(coder, steps=1, micro_batches=2, rows=(2,))
    assert [len(micro_batch["input_ids"]) for micro_batch in step] == [2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_has_one_two_and_three_rows_padded_on_both_sides_about_powers_of_two(
    seed: int,
) -> None:
    batches = training_batches(CODER, steps=3, micro_batches=2, seed=seed)
    shapes = [[tuple(one["input_ids"].shape) for one in step] for step in batches]
    assert [[rows for rows, _ in step] for step in shapes] == [[2, 1], [1, 3], [3, 2]]
    lengths = [length for step in shapes for _, length in step]
    # The first tile of a power of two, or of a multiple of one, is nearly full, full or overflows.
    assert [length % 16 for length in lengths].count(0) == 2
    assert sorted({length % 16 for length in lengths}) == [0, 1, 15]
    masks = [one["attention_mask"] for step in batches for one in step if len(one["labels"]) > 1]
    assert [bool((mask[:, 0] == 0).any()) for mask in masks] == [False, True, False, True]
    assert [bool((mask[:, -1] == 0).any()) for mask in masks] == [True, False, True, False]


@pytest.mark.parametrize(
    ("shapes", "numbers"),
    [
        ("unequal", [4, 4, 4]),
        ("equal-first-step", [1, 4, 4]),
        ("equal", [1, 1, 1]),
        ("equal-in-all-steps", [1, 1, 1]),
    ],
)
def test_shapes_of_a_step_are_as_asked_for(shapes: Shapes, numbers: list[int]) -> None:
    batches = training_batches(CODER, steps=3, micro_batches=4, shapes=shapes)
    assert [len({one["input_ids"].shape for one in step}) for step in batches] == numbers
    for step in batches:
        assert len({count_label_tokens(micro_batch) for micro_batch in step}) == 4


def test_a_run_can_have_one_shape_in_all_steps() -> None:
    batches = training_batches(CODER, steps=4, micro_batches=3, shapes="equal-in-all-steps")
    assert len({one["input_ids"].shape for step in batches for one in step}) == 1
    # Without padding a model drops the mask: that would be another program to compile.
    assert not any(bool(one["attention_mask"].all()) for step in batches for one in step)


@pytest.mark.parametrize("shapes", get_args(Shapes))
def test_labels_mask_the_prompt_and_the_padding_and_nothing_else(shapes: Shapes) -> None:
    for micro_batch in chain(*training_batches(CODER, steps=2, micro_batches=4, shapes=shapes)):
        ids, mask, labels = (
            micro_batch[name] for name in ("input_ids", "attention_mask", "labels")
        )
        assert ids.shape == mask.shape == labels.shape
        for row in range(len(ids)):
            length = int(mask[row].sum())
            num_prompt = length // 4
            # Padding lies on one side.
            assert int(mask[row].diff().abs().sum()) <= 1
            assert (ids[row, mask[row] == 0] == PAD).all()
            assert (labels[row, mask[row] == 0] == IGNORED).all()
            own_ids, own_labels = ids[row, mask[row] == 1], labels[row, mask[row] == 1]
            assert (own_labels[:num_prompt] == IGNORED).all()
            assert torch.equal(own_labels[num_prompt:], own_ids[num_prompt:])


def test_the_seed_decides_the_batches() -> None:
    def first_ids(seed: int) -> list[int]:
        batch = training_batches(CODER, steps=1, micro_batches=1, seed=seed)[0][0]
        return [int(id_) for id_ in batch["input_ids"].flatten()]

    assert first_ids(0) == first_ids(0)
    assert first_ids(0) != first_ids(1)


def test_a_single_row_has_unequal_counts_too() -> None:
    (step,) = training_batches(CODER, steps=1, micro_batches=40, rows=(1,))
    assert len({count_label_tokens(micro_batch) for micro_batch in step}) == 40


def test_label_tokens_are_counted_as_a_causal_model_predicts_them() -> None:
    # The first token of a row is predicted by nothing: its label does not count.
    labels = torch.tensor([[5, 6, IGNORED, 7], [IGNORED, IGNORED, 8, IGNORED]])
    assert count_label_tokens({"labels": labels}) == 3
    assert check_batch([{"labels": labels}, {"labels": labels}]) == 6


def test_a_step_without_labels_is_refused() -> None:
    labels = torch.tensor([[5, IGNORED, IGNORED]])
    with pytest.raises(UsageError, match=r"no unmasked label token: its loss is a mean of nothing"):
        check_batch([{"labels": labels}])


def test_a_micro_model_is_coded_as_bytes() -> None:
    coder = coder_of("micro:llama?trained=0")
    assert coder.encode("ab") == [256, 97, 98]
    assert coder.pad_token_id == PAD
