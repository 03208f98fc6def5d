"""The documentation shows examples as they are."""

import re
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_training_shows_the_file_that_is_tested(root: Path) -> None:
    shown = _BLOCK.findall((root / "docs/training.md").read_text(encoding="utf-8"))

    assert (root / "examples/own_trainer.py").read_text(encoding="utf-8") in shown
