"""The documentation shows examples as they are."""

import re
from pathlib import Path

import pytest

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("document", "example"),
    [("training.md", "own_trainer.py"), ("architecture.md", "toy_replay.py")],
)
def test_a_document_shows_the_file_that_is_tested(root: Path, document: str, example: str) -> None:
    shown = _BLOCK.findall((root / "docs" / document).read_text(encoding="utf-8"))
    tested = (root / "examples" / example).read_text(encoding="utf-8")
    assert any(block in tested for block in shown if len(block) > 500)
