"""The network as a tree, with the worst child of each module marked."""

import math
from pathlib import Path
from typing import Any

import pytest

from assay.report.page.worst_places import MAX_DEPTH, ModuleTree, Node, draw_tree
from assay.report.run_report import Report
from assay.verdicts import Location, Measurement, Outcome, Verdict


def row(module: str, ratio: float, order: int = 0, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "statistic": "accumulated",
        "order": order, "actual": 0.01 * ratio, "expected": 0.01, "ratio": ratio, "limit": 3.0,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def tree_of(*rows: Measurement, location: Location | None = None, **bounds: int) -> ModuleTree:
    verdict = Verdict(verdict=Outcome.FAIL, location=location)
    found = draw_tree(Report(Path("run"), verdict, list(rows)), **bounds)
    assert found is not None
    return found


def at(tree: ModuleTree, path: str) -> Node:
    node = tree.root
    for name in path.split("."):
        node = node.children[name]
    return node


LAYERS = [
    row("layers.0.up", 1.0, 0), row("layers.0.down", 2.0, 1),
    row("layers.1.up", 9.0, 2), row("layers.1.down", 4.0, 3), row("head", 1.5, 4),
]  # fmt: skip


def test_each_module_has_the_worst_of_what_it_contains() -> None:
    tree = tree_of(*LAYERS)
    found = {
        path: at(tree, path).worst.ratio for path in ("layers", "layers.0", "layers.1", "head")
    }
    assert found == {"layers": 9.0, "layers.0": 2.0, "layers.1": 9.0, "head": 1.5}
    assert tree.root.worst.ratio == 9.0


def test_ratio_is_held_against_the_limit_of_its_own_statistic() -> None:
    tree = tree_of(row("a", 6.0, limit=7.0), row("b", 4.0, limit=3.0))
    assert tree.root.worst.module == "b"
    assert (at(tree, "a").is_over, at(tree, "b").is_over) == (False, True)


def test_worst_child_of_each_module_is_marked() -> None:
    tree = tree_of(*LAYERS)
    marked = [path for path in ("layers", "head", "layers.0", "layers.1", "layers.0.up",
                                "layers.0.down", "layers.1.up", "layers.1.down")
              if at(tree, path).is_worst]  # fmt: skip
    assert marked == ["layers", "layers.1", "layers.0.down", "layers.1.up"]


def test_equal_values_have_no_worst_child() -> None:
    tree = tree_of(row("a", 0.0), row("b", 0.0))
    assert not at(tree, "a").is_worst


def test_nan_and_values_that_must_be_equal_are_over_their_limits() -> None:
    tree = tree_of(row("a", math.nan), row("b", 0.5, limit=0.0), row("c", 0.0, limit=0.0))
    assert [at(tree, name).is_over for name in "abc"] == [True, True, False]


def test_tree_is_open_along_the_path_to_the_located_module() -> None:
    tree = tree_of(*LAYERS, location=Location(phase="forward", module="layers.1.up"))
    assert tree.root.is_open
    assert at(tree, "layers").is_open
    assert at(tree, "layers.1").is_open
    assert not at(tree, "layers.0").is_open


def test_children_stand_in_network_order() -> None:
    tree = tree_of(*reversed(LAYERS))
    assert list(tree.root.children) == ["layers", "head"]
    assert list(at(tree, "layers").children) == ["0", "1"]


def test_added_error_is_what_the_inputs_do_not_have() -> None:
    tree = tree_of(
        row("a", 3.0, port="input.x"), row("a", 5.0), row("b", 5.0, port="input.x"), row("b", 4.0),
        row("c", 2.0), row("d", 2.0, port="input.x"), row("d", math.nan),
    )  # fmt: skip
    assert at(tree, "a").added == pytest.approx(0.04)
    assert at(tree, "b").added == 0.0
    assert at(tree, "c").added is None  # its inputs were not compared
    assert math.isnan(at(tree, "d").added or 0.0)


def test_too_many_modules_are_those_with_the_lowest_ratios_and_it_is_stated() -> None:
    tree = tree_of(*LAYERS, max_nodes=5)
    assert list(tree.root.children) == ["layers"]
    assert list(at(tree, "layers").children) == ["1"]
    assert list(at(tree, "layers.1").children) == ["up", "down"]
    assert tree.statements == [
        "5 of 9 modules are shown, those nearest to or over their limits."
    ]  # fmt: skip


def test_hostile_path_has_a_bounded_depth() -> None:
    node, depth = tree_of(row("a." * 5000 + "a", 2.0)).root, 0
    while node.children:
        (node,) = node.children.values()
        depth += 1
    assert depth == MAX_DEPTH


def test_rows_that_are_only_shown_make_no_tree() -> None:
    report = Report(Path("run"), Verdict(verdict=Outcome.PASS), [row("a", 1.0, limit=None)])
    assert draw_tree(report) is None
