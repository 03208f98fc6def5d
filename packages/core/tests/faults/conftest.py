from pathlib import Path

import pytest

from packages.core.tests.faults.corpus import choose_faults
from packages.core.tests.faults.published.corpus import choose_bugs

CORPORA = {
    "generation": ("test_faults.py",),
    "training": ("test_training_faults.py",),
    "published": ("test_published.py", "test_loads.py"),
    "offline": ("test_offline_faults.py",),
    "foreign": ("test_foreign_faults.py",),
    "reproductions": ("test_reproductions.py",),
}
# The option that chooses some of a corpus.
CHOICES = {
    "generation": "--fault",
    "training": "--training-fault",
    "published": "--published-bug",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="device of the candidates; for --corpus generation alone"
    )
    parser.addoption("--corpus", choices=CORPORA, help="only faults of this; default: all")
    parser.addoption("--draw", type=int, default=52, help="seed of --corpus reproductions")
    parser.addoption("--fault", default="", help="only faults whose name contains this")
    parser.addoption("--training-fault", default="", help="the same of faults in training")
    parser.addoption("--published-bug", default="", help="the same of published bugs")
    parser.addoption(
        "--publish",
        action="store_true",
        help="write the totals into docs/detection.md, the tables into docs/detection/",
    )


def pytest_configure(config: pytest.Config) -> None:
    publishes, device = config.getoption("--publish"), config.getoption("--device")
    if device != "cpu" and (publishes or _wanted(config) != ["generation"]):
        raise pytest.UsageError("--device is for --corpus generation, without --publish")
    if publishes and any(map(config.getoption, CHOICES.values())):
        raise pytest.UsageError("--publish is for all faults: choose none")


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    choose_faults(config.getoption("--fault", ""))
    choose_bugs(config.getoption("--published-bug", ""))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = _wanted(config)
    others = {file for name, files in CORPORA.items() if name not in wanted for file in files}
    return True if collection_path.name in others else None


def _wanted(config: pytest.Config) -> list[str]:
    """Corpora that are run: that of --corpus, those of which some are chosen, or all but the slowest."""
    if corpus := config.getoption("--corpus"):
        return [corpus]
    # Faults of generation as dumps take an hour more, and a draw half an hour.
    chosen = [name for name, option in CHOICES.items() if config.getoption(option)]
    return chosen or [name for name in CORPORA if name not in ("offline", "reproductions")]
