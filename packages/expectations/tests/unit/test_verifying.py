from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.runs import SilentProgress
from assay_expectations.judging.numbers import LIMITS, limits_origin
from assay_expectations.records import read_expectation
from assay_expectations.verifying import SHIPPED, find_files, verify_expectations


def test_expectations_are_found_in_folders(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "notes.txt"):
        (tmp_path / name).touch()
    assert find_files([tmp_path]) == [tmp_path / "a.json", tmp_path / "b.json"]
    assert find_files([tmp_path / "b.json"]) == [tmp_path / "b.json"]


@pytest.mark.parametrize("name", ["", "absent.json", "absent"])
def test_path_without_expectations_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"has no expectation; `assay expect capture`"):
        find_files([tmp_path / name])


def test_two_expectations_of_one_key_are_refused(tmp_path: Path) -> None:
    shipped = find_files([SHIPPED])[0]
    copy = tmp_path / "copy.json"
    copy.write_bytes(shipped.read_bytes())
    with pytest.raises(UsageError) as raised:
        verify_expectations([shipped, copy], "cpu/float32", tmp_path, SilentProgress())
    assert str(raised.value) == f"{shipped} and {copy} have the same key; delete one"


def test_shipped_expectations_have_the_current_limits() -> None:
    shipped = [read_expectation(file) for file in find_files([SHIPPED])]
    assert shipped
    for expectation in shipped:
        assert expectation.limits == LIMITS
        assert expectation.limits_origin == limits_origin(
            expectation.model, expectation.key.machine
        )
