"""The models that the shipped suite tests."""

from typing import Any

import pytest

from assay.models import RECIPES
from assay_expectations.pytest_plugin import MODELS_VARIABLE, expected_models


class Config:
    """Answers for the option of the command line."""

    def __init__(self, *models: str) -> None:
        self.models = [*models] or None

    def getoption(self, name: str) -> list[str] | None:
        assert name == "expectation_model"
        return self.models


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        (["a", "b", "a"], "c", ["a", "b"]),
        ([], " c, d,", ["c", "d"]),
        ([], "", [f"micro:{name}" for name in RECIPES]),
    ],
)
def test_the_option_goes_before_the_variable_and_that_before_the_recipes(
    option: list[str], variable: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, variable)
    config: Any = Config(*option)
    assert expected_models(config) == expected
