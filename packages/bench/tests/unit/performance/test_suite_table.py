import ast
from pathlib import Path

import pytest

import assay_bench.performance
from assay.errors import UsageError
from assay_bench.performance.suite_table import SUITES, choose_suites


def test_all_suites_are_the_default() -> None:
    assert choose_suites([]) == list(SUITES)


def test_suites_run_in_the_order_of_the_table() -> None:
    assert choose_suites(["compare", "prefill"]) == ["prefill", "compare"]


def test_unknown_suite_lists_the_suites() -> None:
    with pytest.raises(UsageError, match="no suite 'prefil'; suites: training-step, pre"):
        choose_suites(["prefill", "prefil"])


def test_every_public_function_that_returns_work_is_a_suite() -> None:
    source = Path(assay_bench.performance.__file__).with_name("suites.py").read_text()
    shipped = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        and ast.unparse(node.returns).startswith("Work[")
    ]  # fmt: skip
    assert shipped == [suite.replace("-", "_") for suite in SUITES]
