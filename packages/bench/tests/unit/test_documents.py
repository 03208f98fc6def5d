import random

from assay.inputs import built_in_texts
from assay_bench.documents import (
    CONTEXT_LENGTH,
    NUM_CHOICES,
    PIECE_LENGTH,
    next_text_documents,
)

TEXTS = ["".join(random.Random(seed).choices("abcdefgh", k=80)) for seed in range(4)]  # noqa: S311


def test_the_right_choice_is_what_follows_and_the_others_are_not() -> None:
    documents = next_text_documents(TEXTS)
    # Of 80 characters 48 are the first context; the other 32 are four pieces.
    assert len(documents) == 4 * 4
    for document in documents:
        (text,) = (text for text in TEXTS if document["context"] in text)
        right = document["choices"][document["label"]]
        assert document["context"] + right in text
        assert len(document["context"]) == CONTEXT_LENGTH
        assert [len(choice) for choice in document["choices"]] == [PIECE_LENGTH] * NUM_CHOICES
        assert len(set(document["choices"])) == NUM_CHOICES
        wrong = set(document["choices"]) - {right}
        assert not any(document["context"] + choice in text for choice in wrong)


def test_the_seed_decides_the_documents() -> None:
    assert next_text_documents(TEXTS) == next_text_documents(TEXTS)
    assert next_text_documents(TEXTS) != next_text_documents(TEXTS, seed=1)


def test_texts_that_are_too_short_ask_nothing() -> None:
    assert next_text_documents(["x" * (CONTEXT_LENGTH + PIECE_LENGTH - 1)]) == []


def test_the_built_in_texts_give_enough_documents_to_see_a_drop_of_two_percent() -> None:
    documents = next_text_documents(built_in_texts())
    assert len(documents) > 7 / 0.02  # seven losses are significant, see assay_bench.judging
    labels = [document["label"] for document in documents]
    assert min(labels.count(place) for place in range(NUM_CHOICES)) > len(labels) / 8
