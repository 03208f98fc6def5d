import pytest
import torch

from assay.training.batches import TextCoder
from assay.training.losses import IGNORED
from assay_bench.tuning.rank_tasks import draw_step, held_out_rows
from assay_bench.tuning.records import DataSource, Permutation, Text, TuningRecipe

PAD = 0
CODER = TextCoder(lambda text: [ord(letter) for letter in text], PAD)
SMALL = Text("\n".join("abcdefghij" * 3), "\n".join("ABCDEFGHIJ" * 3))
LARGE = Text("\n".join("klmnopqrst" * 3), "\n".join("KLMNOPQRST" * 3))


def recipe(**changes: object) -> TuningRecipe:
    return TuningRecipe(
        models=["micro:llama"],
        run="cpu/float32",
        seeds=[0],
        steps=3,
        batch_size=8,
        sequence_length=6,
        checkpoint_every=1,
        data=[DataSource(source="sums")],
        permutations={"full": Permutation(learning_rate=1.0)},
    ).model_copy(update=changes)


def draw(
    texts: dict[str, Text],
    *,
    shares: tuple[float, ...] = (0.5, 0.5),
    seed: int = 0,
    step: int = 0,
    ranks: int = 1,
) -> list[list[str]]:
    """The text of every row, by rank."""
    data = [
        DataSource(source=name, share=share) for name, share in zip(texts, shares, strict=False)
    ]
    batch = draw_step(texts, recipe(data=data), CODER, seed=seed, step=step, ranks=ranks)
    return [["".join(map(chr, row)) for row in one["input_ids"].tolist()] for one in batch]


def test_rows_depend_only_on_seed_and_step() -> None:
    sources = {"small": SMALL}
    assert draw(sources, seed=1, step=2) == draw(sources, seed=1, step=2)
    assert draw(sources, seed=1, step=2) != draw(sources, seed=1, step=1)
    assert draw(sources, seed=1, step=2) != draw(sources, seed=2, step=2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_the_rows_of_one_process(ranks: int) -> None:
    sources = {"small": SMALL, "large": LARGE}
    (whole,), shared = draw(sources), draw(sources, ranks=ranks)
    assert sorted(row for one in shared for row in one) == sorted(whole)
    assert {len(one) for one in shared} == {8 // ranks}
    if ranks < 8:  # each rank has rows of both sources
        assert all(any(row[0] < "k" for row in one) for one in shared)
        assert all(any(row[0] >= "k" for row in one) for one in shared)


@pytest.mark.parametrize(("share", "num_small"), [(0.5, 4), (0.75, 6), (0.125, 1), (0.1, 1)])
def test_every_batch_has_its_share_of_each_source(share: float, num_small: int) -> None:
    sources = {"small": SMALL, "large": LARGE}
    for step in range(3):
        (rows,) = draw(sources, shares=(share, 1 - share), step=step)
        assert sum(row[0] < "k" for row in rows) == num_small


def test_row_begins_with_a_line_and_wraps_around() -> None:
    (rows,) = draw({"small": Text("ab\ncd", "x")})
    assert set(rows) <= {"ab\ncda", "cdab\nc"}


def test_labels_are_all_tokens_except_padding() -> None:
    # Text of 4 tokens for rows of 6.
    one = {"sums": Text("abcd", "x")}
    (batch,) = draw_step(one, recipe(), CODER, seed=0, step=0, ranks=1)
    assert batch["input_ids"].shape == (8, 6)
    short = TextCoder(lambda text: [ord(letter) for letter in text[:4]], PAD)
    long_row = {"sums": Text("abcdefgh", "x")}
    (batch,) = draw_step(long_row, recipe(), short, seed=0, step=0, ranks=1)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["attention_mask"].all()
    assert IGNORED not in batch["labels"]


def test_held_out_rows_come_from_the_held_out_part() -> None:
    rows = held_out_rows(SMALL, recipe(held_out_rows=5), CODER)
    assert len(rows) == 5
    letters = {chr(id_) for row in rows for id_ in row["input_ids"].flatten().tolist()}
    assert letters <= set("ABCDEFGHIJ\n")
