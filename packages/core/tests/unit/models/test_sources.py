"""What a MODEL argument names."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay.models import resolve_model


def test_recipe_is_trained_by_default() -> None:
    source = resolve_model("micro:llama")
    assert (source.kind, source.trained, source.seed) == ("micro", True, 0)
    assert source.recipe is not None
    assert source.recipe.name == "llama"


def test_untrained_recipe_takes_a_seed() -> None:
    source = resolve_model("micro:bert?trained=0&seed=17")
    assert (source.trained, source.seed) == (False, 17)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("micro:lama", "no recipe 'lama'; there are llama, mistral"),
        ("micro:", "no recipe ''"),
        ("micro:llama?size=9", "unknown option 'size'"),
        ("micro:llama?trained", "trained=0|1"),
        ("micro:llama?trained=yes", "trained=0|1"),
        ("micro:llama?trained=0&seed=-1", "seed=N"),
        ("micro:llama?seed=1", "a seed needs trained=0"),
        ("./nowhere", "no such folder"),
        ("/nowhere", "no such folder"),
        ("a/b/c", "no such folder"),
        ("", "no such folder"),
    ],
)
def test_unknown_model_is_a_usage_error(reference: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model(reference)
    assert message in str(caught.value)


def test_folder_is_found_by_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)).folder == tmp_path


def test_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(file))


def test_reference_that_is_neither_recipe_nor_folder_may_be_a_hub_name() -> None:
    source = resolve_model("some-owner/some.model-7B")
    assert (source.kind, source.folder, source.recipe) == ("hub", None, None)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ((), "there is no folder models/lama; models has no folders"),
        ((".git",), "there is no folder models/lama; models has no folders"),
        (("llama", "gemma"), "there is no folder models/lama; models has: gemma, llama"),
        (
            tuple("gfedcba"),
            "there is no folder models/lama; models has: a, b, c, d, e and 2 more",
        ),
    ],
    ids=["empty", "hidden", "two", "seven"],
)
def test_mistyped_folder_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models/README.md").touch()
    with pytest.raises(UsageError) as caught:
        resolve_model("models/lama")
    assert str(caught.value) == message


def test_file_called_like_an_owner_leaves_the_hub_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-owner").touch()
    assert resolve_model("some-owner/some.model-7B").kind == "hub"
    assert resolve_model("gpt2").kind == "hub"


def test_resolving_loads_no_torch() -> None:
    code = (
        "import sys, assay.models, assay.inputs; assay.models.resolve_model('micro:llama');"
        " sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"model\.safetensors: cannot be read: No such file"):
        resolve_model(str(tmp_path))


def test_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match=r"config\.json: it is a folder, not a file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("denied", ["config.json", "model.safetensors", "tokenizer.json"])
def test_file_without_permission_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path)).folder == tmp_path.resolve()
    really_open = os.open

    def open_unless_denied(path: Path, *arguments: Any) -> Any:  # root may open every file
        if path.name == denied:
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", open_unless_denied)
    with pytest.raises(UsageError, match=f"{denied}: cannot be read: Permission denied"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "merges.txt", "model.safetensors"]
)
def test_file_that_never_ends_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=f"{name}: it is a FIFO, a socket or a device"):
        resolve_model(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=f"{name}: it is a FIFO, a socket or a device"):
        resolve_model(str(tmp_path))
