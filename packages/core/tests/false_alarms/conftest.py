from pathlib import Path

import pytest

from packages.core.tests.false_alarms.offline_pairs import DTYPES, RECIPES
from packages.core.tests.false_alarms.parts import Part
from packages.core.tests.false_alarms.training_variants import training_variants
from packages.core.tests.false_alarms.variants import variants
from packages.core.tests.foreign.captures import captures_with
from packages.core.tests.foreign.judged import CLEAN
from packages.core.tests.foreign.quantized import folders_with

CORPORA = {
    "generation": "test_false_alarms.py",
    "training": "test_training_false_alarms.py",
    "offline": "test_offline_false_alarms.py",
    "foreign": "test_foreign_false_alarms.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--corpus", choices=CORPORA, help="only variants of this; default: all")
    parser.addoption("--variant", default="", help="only variants whose name contains this")
    parser.addoption(
        "--part", type=Part.parse, default=Part(1, 1), help="only a part of them, such as 2/4"
    )
    parser.addoption(
        "--publish",
        action="store_true",
        help="write the totals into docs/detection.md, the tables into docs/detection/",
    )
    parser.addoption(
        "--limits-to", help="write limits calibrated on the runs of one --corpus to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in ("--publish", "--limits-to"):
        is_whole = not config.getoption("--variant") and config.getoption("--part").of == 1
        if config.getoption(option) and not is_whole:
            raise pytest.UsageError(
                f"{option} is for a whole corpus: leave out --variant and --part"
            )
    calibrated = ("generation", "training")
    if config.getoption("--limits-to") and config.getoption("--corpus") not in calibrated:
        raise pytest.UsageError(
            f"--limits-to is for the runs of one corpus: add --corpus {' or '.join(calibrated)}"
        )


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    wanted = config.getoption("--variant")
    names = {
        "generation": [variant.name for variant in variants()],
        "training": [variant.name for variant in training_variants()],
        "offline": [f"{recipe} {dtype}" for recipe in RECIPES for dtype in DTYPES],
        "foreign": [
            *(capture.name for capture in captures_with([CLEAN])),
            *(" ".join(one) for one in folders_with([CLEAN])),
        ],
    }
    chosen = [config.getoption("--corpus")] if config.getoption("--corpus") else list(names)
    if not any(wanted in name for corpus in chosen for name in names[corpus]):
        raise pytest.UsageError(f"--variant {wanted}: no variant has such a name")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    corpus = config.getoption("--corpus")
    others = {file for name, file in CORPORA.items() if corpus not in (None, name)}
    others |= {"test_minimal_trainers.py"} if corpus not in (None, "training") else set()
    return True if collection_path.name in others else None
