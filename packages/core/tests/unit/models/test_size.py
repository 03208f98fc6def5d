"""Sizes of models that are not loaded."""

from pathlib import Path

import pytest

from assay.models import count_parameters

# vocabulary 300, hidden 16, MLP 24, 2 layers, 2 heads and 1 kv head of 8:
# 2 x 300 x 16 + 16 + 2 x (2 x 16 x 16 + 2 x 8 x 16 + 3 x 16 x 24 + 2 x 16) = 13520
PARAMETERS = 13520


def test_folder_is_sized_by_its_headers(saved_llama: Path) -> None:
    assert count_parameters(str(saved_llama)) == PARAMETERS


def test_values_are_not_read(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.models.size._count_on_meta", None)
    assert count_parameters(str(llama_folder)) == PARAMETERS


def test_untrained_recipe_is_sized_by_its_configuration() -> None:
    # hidden 96, MLP 256, 4 layers, 4 heads and 2 kv heads of 24, vocabulary 260, untied:
    # 2 x 260 x 96 + 96 + 4 x (2 x 96 x 96 + 2 x 48 x 96 + 3 x 96 x 256 + 2 x 96) = 456288
    assert count_parameters("micro:llama?trained=0") == 456288
