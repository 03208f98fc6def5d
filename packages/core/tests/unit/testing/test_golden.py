from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.testing.golden import golden_folder, refuse_stale_goldens


def test_every_test_has_a_folder_of_its_own() -> None:
    file = Path("/tests/test_llama.py")
    assert golden_folder(file, "test_it") == Path("/tests/goldens/test_llama/test_it")
    names = ["test_it[micro:llama]", "test_it[micro/llama]", "TestA::test_it", "TestA/test_it"]
    folders = [golden_folder(file, name) for name in names]
    assert len(set(folders)) == 4
    assert {folder.parent for folder in folders} == {Path("/tests/goldens/test_llama")}


def test_golden_of_no_test_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "test_llama.py"
    stale = golden_folder(file, "test_before")
    for folder in (stale, golden_folder(file, "test_now")):
        folder.mkdir(parents=True)
    with pytest.raises(UsageError) as raised:
        refuse_stale_goldens(file, ["test_now"])
    assert str(raised.value) == f"no test uses these goldens; delete them: {stale}"
    stale.rmdir()
    refuse_stale_goldens(file, ["test_now", "test_never_captured"])
