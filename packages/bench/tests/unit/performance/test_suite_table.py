import ast

import pytest

from assay.errors import UsageError
from assay_bench.performance.suite_table import SUITE_FOLDER, SUITES, choose_suites


def test_all_suites_are_the_default() -> None:
    assert choose_suites([]) == tuple(SUITES.values())


def test_suites_run_in_the_order_of_the_table() -> None:
    assert [suite.name for suite in choose_suites(["compare", "prefill"])] == ["prefill", "compare"]


def test_unknown_suite_lists_the_suites() -> None:
    with pytest.raises(UsageError, match="no suite 'prefil'; suites: training-step, pre"):
        choose_suites(["prefill", "prefil"])


def test_every_shipped_test_is_a_suite() -> None:
    shipped = {
        (file.name, node.name)
        for file in SUITE_FOLDER.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert shipped == {(suite.file, suite.function) for suite in SUITES.values()}
