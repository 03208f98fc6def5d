"""The table of measurements, the ranks, and the tree of modules."""

import math
from pathlib import Path
from typing import Any

import pytest

from assay.report.page import tables
from assay.report.page.tables import MAX_DEPTH, ModuleTree, Node, draw_ranks, draw_table, draw_tree
from assay.report.run_report import Report
from assay.verdicts import Location, Measurement, Outcome, Suspect, Verdict


def measured(ratio: float, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": "a", "port": "output", "statistic": "token",
        "actual": 0.02, "expected": 0.01, "ratio": ratio,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def report_of(*rows: Measurement) -> Report:
    return Report(Path("run"), Verdict(verdict=Outcome.FAIL), list(rows))


def test_rows_begin_with_the_highest_ratio_and_nan() -> None:
    broken = measured(math.nan, actual=math.nan)
    table = draw_table(report_of(measured(1.0), broken, measured(5.0)))
    assert [str(row.ratio) for row in table.rows] == ["nan", "5.0", "1.0"]
    assert table.statements == []


def test_values_without_a_ratio_come_last_and_show_none() -> None:
    table = draw_table(report_of(measured(math.nan), measured(1.0)))
    assert [str(row.ratio) for row in table.rows] == ["1.0", "nan"]
    columns: Any = table.packed()["columns"]
    ratio = next(column for column in columns if column["title"] == "ratio")
    assert [ratio["labels"][code] for code in ratio["codes"]] == ["1.0", None]


def test_judged_rows_are_kept_before_higher_ones_that_were_not() -> None:
    rows = [measured(9.0), measured(0.5, limit=3.0), measured(8.0)]
    table = draw_table(report_of(*rows), max_rows=2)
    assert [row.ratio for row in table.rows] == [9.0, 0.5]
    assert table.statements == [
        (
            "2 of 3 measurements are listed: those that were judged, then those with the highest "
            "ratios; the highest ratio left out is 8.0x."
        )
    ]


def test_every_field_of_a_measurement_is_a_column() -> None:
    packed: dict[str, Any] = draw_table(report_of(measured(1.0))).packed()
    titles = [column["title"] for column in packed["columns"]]
    renamed = {"actual": "candidate", "expected": "noise", "position": "token"}
    # The order of a stage is that of the pictures, which means nothing in a table.
    fields = set(Measurement.model_fields) - {"order"}
    assert set(titles) == {renamed.get(name, name) for name in fields}
    assert packed["count"] == 1


def of_rank(module: str, rank: int, ratio: float, limit: float | None = 2.0) -> Measurement:
    return Measurement(
        level="modules", module=module, port="output", statistic="accumulated", rank=rank,
        actual=ratio, expected=1.0, ratio=ratio, limit=limit,
    )  # fmt: skip


ROWS = [
    of_rank("embed", 0, 0.5), of_rank("layers.0.up", 0, 1.0), of_rank("layers.1.up", 0, 1.5),
    of_rank("layers.1.down", 0, 0.2), of_rank("model.layers.1.up", 1, 8.0), of_rank("embed", 1, 0.1),
]  # fmt: skip


def test_each_rank_has_its_worst_place_and_the_worst_of_each_layer() -> None:
    found = draw_ranks(report_of(*ROWS))
    assert found is not None
    assert found.layers == [0, 1]
    assert [(line.rank, line.worst.module) for line in found.lines] == [
        (0, "layers.1.up"), (1, "model.layers.1.up")
    ]  # fmt: skip
    cells = [[one.ratio if one else None for one in line.layers] for line in found.lines]
    assert cells == [[1.0, 1.5], [None, 8.0]]


def test_one_rank_and_rows_that_are_not_judged_make_no_view() -> None:
    assert draw_ranks(report_of(*ROWS[:4], of_rank("embed", 1, 9.0, limit=None))) is None


def test_ranks_with_the_lowest_ratios_are_left_out_and_it_is_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "MAX_RANKS", 1)
    monkeypatch.setattr(tables, "MAX_LAYERS", 1)
    found = draw_ranks(report_of(*ROWS))
    assert found is not None
    assert [line.rank for line in found.lines] == [1]
    assert found.layers == [1]
    assert [text.partition(" are")[0] for text in found.statements] == [
        "1 of 2 ranks", "1 of 2 layers"
    ]  # fmt: skip


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


def test_module_that_the_verdict_names_has_the_ratio_of_its_headline() -> None:
    stated = row("a", 10.5, limit=3.5, statistic="replay-tensor")
    channel = row("a", 90.0, limit=8.4, statistic="replay-channel")
    backward = row("a", 30.0, limit=3.5, statistic="replay-tensor", phase="backward")
    mild = row("b", 8.0, limit=5.5, statistic="replay-tensor", order=1)
    unread = row("b", 24.0, limit=10.0, statistic="replay-channel", order=1)
    verdict = Verdict(
        verdict=Outcome.FAIL, location=Location(phase="forward", module="a"),
        statistic="replay-tensor", noise_ratio=10.5, limit=3.5,
        suspects=[
            Suspect(location=Location(phase="forward", module=module), statistic="replay-tensor",
                    noise_ratio=ratio, limit=limit)
            for module, ratio, limit in (("a", 10.5, 3.5), ("b", 8.0, 5.5))
        ],
    )  # fmt: skip
    rows = [stated, channel, backward, mild, unread]
    tree = draw_tree(Report(Path("run"), verdict, rows))
    assert tree is not None
    assert (at(tree, "a").worst, at(tree, "b").worst) == (stated, mild)
    alone = [one for one in rows if one.phase == "forward"]
    tree = draw_tree(Report(Path("run"), verdict, alone))
    assert tree is not None
    assert tree.root.worst == stated


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
