import sys
import threading
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.launch import UnsendableError
from assay.testing.rank_body import RewritingFinder, _unpack_fixtures, rewrite
from assay.testing.worlds import MeshOfRanks, pack_fixtures


def test_fixtures_keep_shared_objects_on_the_ranks() -> None:
    shared = [1.5]
    unpacked = _unpack_fixtures(pack_fixtures({"left": {"x": shared}, "right": shared}))
    assert unpacked == {"left": {"x": [1.5]}, "right": [1.5]}
    left = unpacked["left"]
    assert isinstance(left, dict)
    assert left["x"] is unpacked["right"]


def test_fixture_that_cannot_be_pickled_is_named_with_the_reason() -> None:
    with pytest.raises(UnsendableError) as caught:
        pack_fixtures({"number": 1, "lock": threading.Lock()})
    assert str(caught.value) == (
        "fixture 'lock' cannot travel to the ranks: lock: cannot pickle '_thread.lock' object."
        " What reaches a rank is pickled; make it inside of the body instead"
    )


class Lost:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_fixture_that_cannot_be_unpickled_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        _unpack_fixtures(pack_fixtures({"number": 1, "lost": Lost()}))
    assert str(caught.value).startswith("fixture 'lost' cannot be made again in a rank: ValueError")


def test_use_of_the_mesh_in_a_fixture_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match=r"^mesh.get_group: the mesh is made in the ranks"):
        _ = MeshOfRanks().get_group
    assert not hasattr(MeshOfRanks(), "__array__")


def test_rewritten_assertions_report_the_values(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def judge(value):\n    assert value == 4\n")
    finder = RewritingFinder({"judge_of_a_test": str(file)})
    sys.meta_path.insert(0, finder)
    try:
        judge = __import__("judge_of_a_test").judge
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop("judge_of_a_test", None)
    with pytest.raises(AssertionError, match="assert 3 == 4"):
        judge(3)
    assert rewrite(file).co_filename == str(file)
    assert finder.find_spec("another", None) is None
