from pathlib import Path

import pytest

CORPORA = {
    "generation": "test_false_alarms.py",
    "training": "test_training_false_alarms.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--corpus", choices=CORPORA, help="only variants of this; default: both")
    parser.addoption("--variant", default="", help="only variants whose name contains this")
    parser.addoption(
        "--publish", action="store_true", help="write the tables into docs/detection.md"
    )
    parser.addoption(
        "--limits-to", help="write limits calibrated on the runs of one --corpus to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--limits-to") and not config.getoption("--corpus"):
        raise pytest.UsageError(
            f"--limits-to is for the runs of one corpus: add --corpus {' or '.join(CORPORA)}"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    corpus = config.getoption("--corpus")
    others = {file for name, file in CORPORA.items() if corpus not in (None, name)}
    return True if collection_path.name in others else None
