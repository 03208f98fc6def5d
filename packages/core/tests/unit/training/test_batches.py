import pytest
import torch

from assay.errors import UsageError
from assay.training.batches import (
    IGNORED,
    TextCoder,
    check_batch,
    coder_of,
    count_label_tokens,
    training_batches,
)

PAD = 258
CODER = TextCoder(lambda text: list(text.encode()), PAD)


def test_micro_batches_have_unequal_label_counts_and_padding() -> None:
    batches = training_batches(CODER, steps=3, micro_batches=3, rows=2)
    assert [len(step) for step in batches] == [3, 3, 3]
    for step in batches:
        assert len({count_label_tokens(micro_batch) for micro_batch in step}) == 3
        assert any((micro_batch["attention_mask"] == 0).any() for micro_batch in step)


def test_labels_mask_the_prompt_and_the_padding_and_nothing_else() -> None:
    for micro_batch in training_batches(CODER, steps=1, micro_batches=4)[0]:
        ids, mask, labels = (
            micro_batch[name] for name in ("input_ids", "attention_mask", "labels")
        )
        assert ids.shape == mask.shape == labels.shape
        for row in range(len(ids)):
            length = int(mask[row].sum())
            num_prompt = length // 4
            assert (mask[row, :length] == 1).all()
            assert (ids[row, length:] == PAD).all()
            assert (labels[row, :num_prompt] == IGNORED).all()
            assert torch.equal(labels[row, num_prompt:length], ids[row, num_prompt:length])
            assert (labels[row, length:] == IGNORED).all()


def test_the_seed_decides_the_batches() -> None:
    def first_ids(seed: int) -> list[int]:
        batch = training_batches(CODER, steps=1, micro_batches=1, seed=seed)[0][0]
        return [int(id_) for id_ in batch["input_ids"].flatten()]

    assert first_ids(0) == first_ids(0)
    assert first_ids(0) != first_ids(1)


def test_a_single_row_has_unequal_counts_too() -> None:
    (step,) = training_batches(CODER, steps=1, micro_batches=40, rows=1)
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
