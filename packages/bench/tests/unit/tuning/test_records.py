"""Recipes, texts, and files of tunings."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import read_sealed, seal
from assay_bench.tuning.records import (
    LOSSES_FILE,
    DataSource,
    Permutation,
    TuningRecipe,
    TuningRecord,
    checkpoint_folder,
    go_back_to_checkpoint,
    model_folder,
    read_recipe,
    read_training_text,
)

TEXT = """
models = ["micro:llama"]
run = "cpu/float32"
seeds = [0, 1]
steps = 4
batch_size = 4
sequence_length = 16
checkpoint_every = 2

[[data]]
source = "sums"

[permutations.full]
learning_rate = 1e-3
"""


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_documented_recipe_marks_its_required_keys() -> None:
    page = (Path(__file__).parents[5] / "docs/benchmark.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```toml\n(models.*?)```", page, re.DOTALL)
    recipe = tomllib.loads(text)
    TuningRecipe.model_validate(recipe)
    marked = set(re.findall(r"^(?:\[+)?([a-z_]+)[^#\n]*# required", text, re.MULTILINE))
    kinds = (TuningRecipe, DataSource, Permutation)
    fields = {name: field for kind in kinds for name, field in kind.model_fields.items()}
    assert marked == {name for name, field in fields.items() if field.is_required()}
    shown = recipe | recipe["data"][0] | recipe["permutations"]["lora"]
    defaults = {
        n: field.get_default() for n, field in fields.items() if n not in (*marked, "features")
    }
    assert {name: shown[name] for name in defaults} == defaults


def test_shipped_recipe_has_full_and_lora_permutations() -> None:
    recipe = read_recipe("micro")[0]
    assert {name: way.features for name, way in recipe.permutations.items()} == {
        "full": [],
        "lora": ["lora"],
    }


def test_comments_and_the_order_of_keys_do_not_change_the_hash(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, TEXT))[0]
    other = TEXT.replace("steps = 4\n", "").replace("models", "# four\nsteps = 4\nmodels")
    assert read_recipe(write(tmp_path, other))[0].hash == recipe.hash
    assert recipe.model_copy(update={"steps": 5}).hash != recipe.hash
    assert TuningRecipe.model_validate_json(recipe.model_dump_json()).hash == recipe.hash


def test_run_option_overrides_the_recipe(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, TEXT), "npu:1/float32")[0].run == "npu:1/float32"
    with pytest.raises(UsageError, match="run: "):
        read_recipe(write(tmp_path, TEXT), "float32")


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").touch()
    recipe, sources = read_recipe(write(tmp_path, TEXT.replace('"sums"', '"own.jsonl"')))
    assert sources == tmp_path
    assert recipe.data[0].source == "own.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 4", "", "steps: it is missing"),
        ("steps = 4", "steps = 0", "steps: it must be greater than 0"),
        ("steps = 4", "steps = '4'", "steps: it must be a whole number"),
        ("steps = 4", "step = 4", "unknown key 'step'; did you mean steps?"),
        (
            'source = "sums"',
            'source = "sums"\nshar = 1',
            "data, entry 1: unknown key 'shar'; did you mean share?",
        ),
        (
            "learning_rate =",
            "learningrate =",
            "permutations.full: unknown key 'learningrate'; did you mean learn",
        ),
        ("steps = 4", "steps = 4\nepochs = 1", "unknown key 'epochs'; known: models, run, seeds,"),
        ("seeds = [0, 1]", "seeds = []", "seeds: it needs at least 1 item"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "seeds contains a duplicate"),
        (
            "learning_rate = 1e-3",
            "learning_rate = -1",
            "permutations.full.learning_rate: it must be greater than 0",
        ),
        (
            "learning_rate = 1e-3",
            "learning_rate = 1e-3\nranks = 3",
            "the batch_size 4 is not divisible by the 3 ranks of permutation full",
        ),
        ('"cpu/float32"', '"cpu"', "run: "),
        ('"micro:llama"', '"micro:lama"', "models, entry 1: unknown recipe 'lama'"),
        (
            '"micro:llama"',
            '"micro:bert"',
            "models, entry 1: micro:bert does not predict next tokens",
        ),
        ('"sums"', '"own.jsonl"', "data, entry 1: source: "),
        ("steps = 4", "steps = ", "Invalid value (at line 5, column 9)"),
    ],
)
def test_error_names_file_and_key_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write(tmp_path, TEXT.replace(old, new))
    with pytest.raises(UsageError) as raised:
        read_recipe(path)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["absent", "absent.toml"])
def test_missing_recipe_lists_the_shipped_recipes(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_recipe(name)
    assert str(raised.value) == f"recipe {name} does not exist; shipped recipes: micro"


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
        ("own.jsonl", '{"text": "a"}\n{"txt": "b"}', ", line 2: text: it is missing"),
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


def write_tuning(tuning: Path, *, checkpoints: list[str], losses: bytes) -> None:
    for name in checkpoints:
        checkpoint_folder(tuning, name).mkdir(parents=True)
    tuning.mkdir(exist_ok=True)
    (tuning / LOSSES_FILE).write_bytes(losses)


def test_tuning_restores_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    # Killed during the write of the fifth line or of the next checkpoint.
    write_tuning(tmp_path, checkpoints=["2", "4", "part"], losses=b"0\n1\n2\n3\n4")
    assert go_back_to_checkpoint(tmp_path) == 4
    assert (tmp_path / LOSSES_FILE).read_bytes() == b"0\n1\n2\n3\n"
    assert [path.name for path in checkpoint_folder(tmp_path, 4).parent.iterdir()] == ["4"]


def test_checkpoints_are_compared_as_numbers(tmp_path: Path) -> None:
    write_tuning(tmp_path, checkpoints=["9", "10"], losses=b"x\n" * 10)
    assert go_back_to_checkpoint(tmp_path) == 10


@pytest.mark.parametrize(
    ("checkpoints", "losses"), [([], b"0\n1\n"), (["part"], b"0\n"), (["4"], b"0\n1\n")]
)
def test_tuning_restarts_if_losses_before_the_checkpoint_are_missing(
    tmp_path: Path, checkpoints: list[str], losses: bytes
) -> None:
    write_tuning(tmp_path, checkpoints=checkpoints, losses=losses)
    assert go_back_to_checkpoint(tmp_path) == 0
    assert (tmp_path / LOSSES_FILE).read_bytes() == b""


def test_new_tuning_has_no_checkpoint(tmp_path: Path) -> None:
    assert go_back_to_checkpoint(tmp_path) == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [("micro:llama?trained=0", "micro-llama-trained-0"), ("/data/my model", "data-my-model")],
)
def test_model_names_its_folder(tmp_path: Path, model: str, name: str) -> None:
    assert model_folder(tmp_path, model) == tmp_path / name


def test_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "micro-llama/full/seed-0/tuning.json"
    path.parent.mkdir(parents=True)
    path.write_text(seal({"schema": 1}))
    with pytest.raises(UsageError) as raised:
        read_sealed(TuningRecord, path)
    assert str(raised.value) == f"{path}: recipe: it is missing"
