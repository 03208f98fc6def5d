from pathlib import Path

import pytest

from assay_smoke.matrix.rules import RULES
from packages.smoke.tests.documented_tables import document_tables, with_tables

DOCUMENT = Path(__file__).parents[5] / "docs" / "smoke.md"


def test_the_tables_of_the_document_are_those_of_the_code() -> None:
    # Written anew by: python packages/smoke/tests/documented_tables.py docs/smoke.md
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text)


def test_a_table_that_was_changed_by_hand_is_found() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    planted = text.replace("One process trains on one card.", "One process trains on two cards.")
    assert planted != text
    assert with_tables(planted) == text


def test_every_rule_has_a_row() -> None:
    table = document_tables()["refused combinations"]
    assert [rule.name for rule in RULES if f"| `{rule.name}` |" not in table] == []


def test_a_document_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="no marks for 'axes'"):
        with_tables("# Nothing\n")
