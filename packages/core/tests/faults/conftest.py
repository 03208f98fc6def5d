import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", default="", help="only faults whose name contains this")
    parser.addoption(
        "--publish", action="store_true", help="write the table into docs/detection.md"
    )
