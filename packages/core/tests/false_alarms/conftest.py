import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--variant", default="", help="only variants whose name contains this")
    parser.addoption(
        "--publish", action="store_true", help="write the table into docs/detection.md"
    )
    parser.addoption("--limits-to", help="write limits calibrated on these runs to this file")
