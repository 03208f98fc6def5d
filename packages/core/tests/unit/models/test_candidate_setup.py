"""Setup functions that raise."""

from pathlib import Path

import pytest
from torch import nn

from assay.errors import UsageError
from assay.models.candidate_setup import set_up
from assay.plugins import load_object

SETUPS = """\
import json


def install(model):
    parse('{')


def parse(text):
    return json.loads(text)  # raises in the standard library
"""


def test_exception_of_a_setup_function_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "setups.py"
    file.write_text(SETUPS)
    with pytest.raises(UsageError) as caught:
        set_up(nn.Identity(), f"{file}:install")
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{file}:install raised JSONDecodeError: Expecting property name")
    assert second == (
        f"  {file}:9, in parse: return json.loads(text)  # raises in the standard library"
    )


def test_exception_of_a_file_s_import_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import json\n1 / 0\n")
    with pytest.raises(UsageError) as caught:
        load_object(f"{file}:install")
    assert str(caught.value).splitlines()[1] == f"  {file}:2, in <module>: 1 / 0"
