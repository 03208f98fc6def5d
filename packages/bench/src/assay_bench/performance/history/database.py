"""Results in one SQLite file: the documents as they are, and of each suite its ratio."""

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Self

from assay.errors import MachineError, UsageError
from assay_bench.performance.history.series import Point, Series, SeriesKey
from assay_bench.performance.results import PerformanceResult

# In the header of the file, so that no other database is taken for one of these. "ASSY" in ASCII.
_APPLICATION_ID = 0x41535359

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION_ID};
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, date TEXT NOT NULL, machine TEXT NOT NULL,
    run TEXT NOT NULL, model TEXT NOT NULL, software TEXT NOT NULL, document TEXT NOT NULL
);
CREATE TABLE ratios (
    run_id INTEGER NOT NULL REFERENCES runs, suite TEXT NOT NULL, ratio REAL NOT NULL,
    PRIMARY KEY (run_id, suite)
);
"""

_SERIES = """
SELECT machine, run, model, suite, date, ratio, software
FROM ratios JOIN runs ON run_id = id ORDER BY machine, run, model, suite, date, id
"""


class HistoryError(UsageError):
    """A file that is no history, or that refuses a result."""

    @classmethod
    def of(cls, path: Path, problem: object) -> Self:
        """What is wrong with the file."""
        return cls(f"{path} is no history of `assay bench history add`: {problem}")

    @classmethod
    def known(cls, path: Path, source: Path) -> Self:
        """`source` was added before: twice the same run would look like two that agree."""
        return cls(f"{source} is in {path} already")


def add_results(path: Path, results: dict[Path, PerformanceResult]) -> None:
    """Add all of `results`, by the files that they were read from, or none; `path` is made if absent.

    Raises: HistoryError if it is no history or has one of them.
    """
    if not path.exists():
        _create(path)
    with _opened(path) as connection, connection:
        for source, result in results.items():
            try:
                _insert(connection, result)
            except sqlite3.IntegrityError:
                raise HistoryError.known(path, source) from None


def read_series(path: Path) -> list[Series]:
    """All series of the history in `path`. Raises: HistoryError if it is none."""
    with _opened(path) as connection:
        rows = connection.execute(_SERIES).fetchall()
    return [
        Series(SeriesKey(*key), tuple(Point(*row[4:]) for row in of_key))
        for key, of_key in groupby(rows, key=lambda row: row[:4])
    ]


def _create(path: Path) -> None:
    try:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(_SCHEMA)
    except sqlite3.Error as error:
        raise MachineError(f"cannot write {path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise HistoryError.of(path, "there is no such file")
    with closing(sqlite3.connect(path)) as connection:
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION_ID:
                raise HistoryError.of(path, "a database of something else")
            yield connection
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise HistoryError.of(path, error) from error


def _insert(connection: sqlite3.Connection, result: PerformanceResult) -> None:
    document = result.to_json()
    cursor = connection.execute(
        "INSERT INTO runs (digest, date, machine, run, model, software, document)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            hashlib.sha256(document.encode()).hexdigest(),
            str(result.provenance.get("date", "")),
            result.machine,
            result.run,
            result.model,
            _software(result),
            document,
        ),
    )
    connection.executemany(
        "INSERT INTO ratios (run_id, suite, ratio) VALUES (?, ?, ?)",
        [(cursor.lastrowid, suite.suite, suite.ratio) for suite in result.suites],
    )


def _software(result: PerformanceResult) -> str:
    git = result.provenance.get("git") or {}
    words = [f"torch {result.versions.get('torch', '?')}"]
    if commit := git.get("commit"):
        words.append(f"commit {commit[:12]}")
    return ", ".join(words)
