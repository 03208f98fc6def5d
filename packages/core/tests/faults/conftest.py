import pytest

from packages.core.tests.faults.corpus import choose_faults


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", default="", help="only faults whose name contains this")
    parser.addoption("--training-fault", default="", help="the same of faults in training")
    parser.addoption(
        "--publish", action="store_true", help="write the table into docs/detection.md"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--publish") and (
        config.getoption("--fault") or config.getoption("--training-fault")
    ):
        raise pytest.UsageError("--publish is for all faults: choose none")


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    choose_faults(config.getoption("--fault", ""))
