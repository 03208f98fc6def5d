"""Results in one SQLite file: the unchanged documents, and columns for queries."""

import hashlib
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

from assay.errors import MachineError, UsageError
from assay_bench.performance.history.series import Point, Series, SeriesKey
from assay_bench.performance.results import PerformanceResult, parse_performance

# In the header of the file, so that no other database is taken for one of these. "ASSY" in ASCII.
_APPLICATION_ID = 0x41535359

_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION_ID};
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, date TEXT NOT NULL, machine TEXT NOT NULL,
    run TEXT NOT NULL, model TEXT NOT NULL, software TEXT NOT NULL, document TEXT NOT NULL
);
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
    """Add `results`, keyed by source file, in one transaction. Create `path` if it is absent.

    Raises: HistoryError if `path` is not a history or already has one of the results; MachineError if
        it cannot be written.
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
    """Read all series of the history in `path`. Compute each ratio from its document.

    Raises: HistoryError if `path` is not a history, or if a document was changed.
    """
    points: dict[SeriesKey, list[Point]] = {}
    with _opened(path) as connection:
        for number, digest, document in connection.execute("SELECT id, digest, document FROM runs"):
            result = _read_document(path, number, digest, document)
            for suite in result.suites:
                key = SeriesKey(result.machine, result.run, result.model, suite.suite)
                point = Point(_date(result), suite.ratio, _software(result))
                points.setdefault(key, []).append(point)
    return [
        Series(key, tuple(sorted(points[key], key=lambda point: point.date)))
        for key in sorted(points)
    ]


def _read_document(path: Path, number: int, digest: str, document: object) -> PerformanceResult:
    if not isinstance(document, str) or _hash(document) != digest:
        raise HistoryError(f"{path}: run {number} was changed after it was added")
    return parse_performance(document, f"{path}: run {number}")


def _create(path: Path) -> None:
    """Create an empty history in a temporary file, then rename it: a partial file never stays."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with closing(sqlite3.connect(temporary)) as connection:
            connection.executescript(_SCHEMA)
        temporary.replace(path)
    except (sqlite3.Error, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(f"cannot write {path}: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise HistoryError.of(path, "there is no such file")
    try:
        with closing(sqlite3.connect(path)) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION_ID:
                raise HistoryError.of(path, "a database of something else")
            yield connection
    except sqlite3.IntegrityError:
        raise
    except sqlite3.OperationalError as error:  # locked, or the disk is full
        raise MachineError(f"{path}: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise HistoryError.of(path, error) from error


def _insert(connection: sqlite3.Connection, result: PerformanceResult) -> None:
    document = result.to_json()
    connection.execute(
        "INSERT INTO runs (digest, date, machine, run, model, software, document)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            _hash(document),
            _date(result),
            result.machine,
            result.run,
            result.model,
            _software(result),
            document,
        ),
    )


def _hash(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()


def _date(result: PerformanceResult) -> str:
    return str(result.provenance.get("date", ""))


def _software(result: PerformanceResult) -> str:
    git = result.provenance.get("git") or {}
    words = [f"torch {result.versions.get('torch', '?')}"]
    if commit := git.get("commit"):
        words.append(f"commit {commit[:12]}")
    return ", ".join(words)
