from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_bench.tuning.recipe import TuningRecipe, read_recipe

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


def test_shipped_recipe_has_full_and_lora_permutations() -> None:
    recipe = read_recipe("micro").recipe
    assert {name: way.features for name, way in recipe.permutations.items()} == {
        "full": [],
        "lora": ["lora"],
    }


def test_comments_and_the_order_of_keys_do_not_change_the_hash(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, TEXT)).recipe
    other = TEXT.replace("steps = 4\n", "").replace("models", "# four\nsteps = 4\nmodels")
    assert read_recipe(write(tmp_path, other)).recipe.hash == recipe.hash
    assert recipe.model_copy(update={"steps": 5}).hash != recipe.hash
    assert TuningRecipe.model_validate_json(recipe.model_dump_json()).hash == recipe.hash


def test_run_option_overrides_the_recipe(tmp_path: Path) -> None:
    assert read_recipe(write(tmp_path, TEXT), "npu:1/float32").recipe.run == "npu:1/float32"
    with pytest.raises(UsageError, match="run: "):
        read_recipe(write(tmp_path, TEXT), "float32")


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").touch()
    read = read_recipe(write(tmp_path, TEXT.replace('"sums"', '"own.jsonl"')))
    assert read.folder == tmp_path
    assert read.recipe.data[0].source == "own.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps = 4", "", "steps: Field required"),
        ("steps = 4", "steps = 0", "steps: Input should be greater than 0"),
        ("steps = 4", "steps = '4'", "steps: Input should be a valid integer"),
        ("steps = 4", "steps = 4\nepochs = 1", "epochs: Extra inputs are not permitted"),
        ("seeds = [0, 1]", "seeds = []", "seeds: List should have at least 1 item"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "seeds contains a duplicate"),
        (
            "learning_rate = 1e-3",
            "learning_rate = -1",
            "permutations.full.learning_rate: Input should be greater than 0",
        ),
        (
            "learning_rate = 1e-3",
            "learning_rate = 1e-3\nranks = 3",
            "the batch_size 4 is not divisible by the 3 ranks of permutation full",
        ),
        ('"cpu/float32"', '"cpu"', "run: "),
        ('"micro:llama"', '"micro:lama"', "models.0: no recipe 'lama'"),
        ('"micro:llama"', '"micro:bert"', "models.0: micro:bert does not predict next tokens"),
        ('"sums"', '"own.jsonl"', "data.0.source: "),
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
