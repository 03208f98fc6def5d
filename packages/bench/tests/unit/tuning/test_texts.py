import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_bench.tuning.recipe import read_training_text


def test_sums_are_right_and_in_one_part_only() -> None:
    text = read_training_text("sums", Path())
    training, held_out = text.training.splitlines(), text.held_out.splitlines()
    assert len(training) + len(held_out) == 10_000
    assert set(training).isdisjoint(held_out)
    # One in twenty of 10,000, plus or minus four standard deviations of 22.
    assert 412 < len(held_out) < 588
    for line in [*training, *held_out]:
        left, _, total = line.partition("=")
        assert sum(map(int, left.split("+"))) == int(total)


def test_standard_library_is_split_by_files() -> None:
    text = read_training_text("standard-library", Path())
    assert "def namedtuple" in text.training + text.held_out
    assert len(text.training) > 10 * len(text.held_out) > 10_000


def test_hash_covers_both_parts(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(100)]
    (tmp_path / "one.txt").write_text("\n\n".join(documents))
    (tmp_path / "other.txt").write_text("\n\n".join([*documents, "one more"]))
    one, other = read_training_text("one.txt", tmp_path), read_training_text("other.txt", tmp_path)
    assert one.hash == read_training_text("one.txt", tmp_path).hash
    assert one.hash != other.hash


def test_jsonl_and_text_of_the_same_documents_are_the_same(tmp_path: Path) -> None:
    documents = [f"first line of {number}\nand another" for number in range(100)]
    (tmp_path / "own.txt").write_text("\n\n".join(documents))
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps({"text": document, "id": 1}) + "\n" for document in documents)
    )
    text = read_training_text("own.txt", tmp_path)
    assert text == read_training_text("own.jsonl", tmp_path)
    assert set((text.training + "\n\n" + text.held_out).split("\n\n")) == set(documents)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("own.jsonl", '{"text": "a"}\n{"txt": "b"}', ", line 2: text: Field required"),
        ("own.jsonl", '{"text": "a"}\n{"text"', ", line 2: "),
        ("own.txt", "one document", ": one in 20 of 1 documents is held out by its content"),
        ("own.txt", "", ": one in 20 of 0 documents is held out by its content"),
        ("absent.txt", None, ": cannot be read"),
    ],
)
def test_file_without_documents_is_refused(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as raised:
        read_training_text(name, tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / name}{problem}")
