"""Wrong weights and settings: what differs, where the right bytes are, and what was done to them."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.reproduce.wrong_values import WrongValue, choose, compare_states, compare_values
from assay.verdicts import Outcome, Verdict

VERDICT = Verdict(verdict=Outcome.FAIL, command=["assay"], levels={})
Run = Callable[..., tuple[object, list[str]]]
RIGHT = torch.arange(1.0, 121.0).reshape(12, 10)


def difference(actual: object, expected: object = RIGHT) -> WrongValue:
    (found,) = compare_values("fc.weight", expected, actual, "after loading")
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script; returns its exit code and lines."""

    def run_script(script: Path, *options: str) -> tuple[object, list[str]]:
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        return end.value.code, capsys.readouterr().out.splitlines()

    return run_script


def test_equal_values_have_no_difference() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert list(compare_values("a", nan, nan.clone(), "")) == []
    assert list(compare_values("a", RIGHT, RIGHT.double(), "")) == []
    assert list(compare_values("a", {"rate": 1e-3}, {"rate": 1e-3}, "")) == []
    assert list(compare_values("a", "text", None, "")) == []


def test_only_elements_around_the_first_difference_are_held() -> None:
    wrong = RIGHT.repeat(1, 3)
    right = wrong.clone()
    wrong[5, 23:], wrong[7, 24] = 0, 0
    found = difference(wrong, right)
    assert found.wrong.sum(1).tolist() == [0, 0, 0, 0, 0, 7, 0, 1, 0, 0, 0, 0]
    # Of the wrong rows, 4 columns come before the first that differs.
    assert found.part == ([5, 7], slice(19, 35))


def with_rows(rows: slice, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = RIGHT.clone()
    changed[rows] = change(changed[rows])
    return changed


@pytest.mark.parametrize(
    ("actual", "where"),
    [
        (
            RIGHT * 1.02,
            "is wrong after loading in all 12 rows: relative error 2e-2; it is 1.02 times the expected one.",
        ),
        (
            with_rows(slice(3, 6), lambda rows: rows * 2),
            (
                "is wrong after loading in rows 3 to 5 of 12: relative error 1.0;"
                " it is 2 times the expected one in 3 of 12 rows."
            ),
        ),
        (
            with_rows(slice(2, 8, 5), lambda rows: rows.flip(0)),
            (
                "is wrong after loading in 2 of the rows 2 to 7 of 12: relative error 0.886;"
                " its rows 2 and 7 are swapped."
            ),
        ),
        (None, "is missing, or has another shape, after loading."),
        (
            RIGHT.where(RIGHT > 1, torch.nan),
            "is wrong after loading in row 0 of 12: relative error nan.",
        ),
    ],
)
def test_the_readme_names_the_rows_and_a_simple_change(
    actual: Tensor | None, where: str, tmp_path: Path
) -> None:
    difference(actual).write("a head", VERDICT, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert f"\nfc.weight {where}\n" in readme


@pytest.mark.parametrize(
    ("expected", "actual", "shown"),
    [
        (RIGHT, RIGHT * 2, "row 0, column 0: 2.0, expected 1.0"),
        (RIGHT, RIGHT.flip(1).bfloat16(), "row 0, column 0: 10.0, expected 1.0"),
        (RIGHT, None, "fc.weight: missing, or of another shape, expected shape [12, 10]"),
        (torch.tensor(3.0), torch.tensor(4.0), "row 0, column 0: 4.0, expected 3.0"),
        (1e-5, 1e-6, "row 0, column 0: 1e-06, expected 1e-05"),
        ([1, 50], [50], "fc.weight: missing, or of another shape, expected shape [2]"),
        (
            {"theta": 5e5, "kind": "a"},
            None,
            "fc.weight: missing, or of another shape, expected shape [1]",
        ),
    ],
)
def test_the_folder_fails_and_passes_with_the_right_value(
    expected: object, actual: object, shown: str, tmp_path: Path, run: Run
) -> None:
    script = difference(actual, expected).write("a head", VERDICT, tmp_path)
    names = ["README.md", "environment.json", "reproduce.py", "tensors.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert len(script.read_text().splitlines()) < 80
    code, lines = run(script)
    assert (code, lines[0], lines[-1]) == (1, shown, "FAIL: fc.weight is wrong")
    assert run(script, "--reference") == (0, ["PASS"])
    assert json.loads((tmp_path / "environment.json").read_text())["site"] == "fc.weight"
    assert set(torch.load(tmp_path / "tensors.pt", weights_only=True)) == {"right", "actual"}


@pytest.mark.parametrize(("right", "wrong"), [(RIGHT, RIGHT * 2), (1e-5, 1e-6)])
def test_the_title_names_the_value_and_the_time(
    right: object, wrong: object, tmp_path: Path
) -> None:
    (found,) = compare_values("moments.fc", right, wrong, "after loading")
    found.write("a place", VERDICT, tmp_path)
    title = (tmp_path / "README.md").read_text().splitlines()[0]
    assert title == "# moments.fc is wrong after loading"


def test_a_value_that_is_held_in_another_dtype_is_compared_in_the_right_one(
    tmp_path: Path, run: Run
) -> None:
    actual = RIGHT.flip(1).bfloat16()
    (found,) = compare_values("fc.weight", RIGHT, actual, "after loading", torch.float32)
    script = found.write("a place", VERDICT, tmp_path)
    assert run(script)[0] == 1
    assert run(script, "--reference") == (0, ["PASS"])


def test_the_environment_does_not_name_the_users_code(tmp_path: Path) -> None:
    verdict = Verdict(
        verdict=Outcome.FAIL,
        command=["assay", "plants.py:wrong"],
        environment={"command": ["plants.py:wrong"], "versions": {"torch": "2.13"}},
        candidate={"setup": "plants.py:wrong", "trainer": "plants.py:Wrong", "run": "cpu/float32"},
    )
    difference(None).write("a head", verdict, tmp_path)
    assert json.loads((tmp_path / "environment.json").read_text()) == {
        "site": "fc.weight",
        "environment": {"versions": {"torch": "2.13"}},
        "reference": {},
        "candidate": {"run": "cpu/float32"},
    }


def test_a_value_of_the_named_parameter_comes_first() -> None:
    step, right = torch.tensor(3.0), {"step": 3, "a.weight": RIGHT, "b.weight": RIGHT}
    found = list(compare_states(right | {"count": step}, {"b.weight": RIGHT * 2}, ""))
    assert [one.name for one in found] == ["step", "a.weight", "b.weight", "count"]
    assert [getattr(choose(found, name), "name", None) for name in ("b.weight", None)] == [
        "b.weight",
        "a.weight",
    ]
    assert choose([], None) is None
