"""The examples in docstrings run, and give what they show."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^\s+>>> (?!.*\+SKIP)", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_show(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))

    assert result.attempted > 0
    assert result.failed == 0
