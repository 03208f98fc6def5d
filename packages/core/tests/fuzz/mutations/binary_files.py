"""Mutations of bytes: of any file, of safetensors headers, of SQLite rows, of pickles."""

import json
import pickle
import random
import sqlite3
from contextlib import closing
from pathlib import Path

from packages.core.tests.fuzz.mutations.hostile_values import hostile_value
from packages.core.tests.fuzz.mutations.json_text import mutate_json

_LENGTH_BYTES = 8
# The largest files that readers of records take, of what becomes the largest values.
_LARGE_BYTES = (64 << 20) - 1024


def mutate_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip, cut, lengthen or recode bytes."""
    at = rng.randrange(len(data) + 1)
    operation = rng.choice(
        ("flip", "flip", "cut", "insert", "replace", "recode", "empty", "double")
    )
    if operation == "flip" and data:
        at %= len(data)
        data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    elif operation == "cut":
        data = data[:at]
    elif operation == "insert":
        data = (
            data[:at]
            + rng.choice((b"\0", b"\xff", b"\x1b[2J", b"\xed\xa0\x80", b"\n\n"))
            + data[at:]
        )
    elif operation == "replace":
        data = data[:at] + rng.randbytes(8) + data[at + 8 :]
    elif operation == "recode":
        prefix = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x80\x02", b"\x1f\x8b", b"PK\x03\x04"))
        data = prefix + data
    elif operation == "empty":
        data = b""
    else:
        data = data + data
    return data, f"{operation} at byte {at}"


def write_large_json(file: Path, rng: random.Random) -> str:
    """Replace a file by one of the largest size, made of what takes most memory."""
    part = rng.choice((b"[],", b"{},", b'"a",', b"0,", b"1e1,"))
    body = part * (_LARGE_BYTES // len(part))
    around = rng.choice(((b"[", b"0]"), (b'{"schema":1,"a":[', b"0]}")))
    file.write_bytes(around[0] + body + around[1])
    return f"64 MiB of {part.decode()}"


def mutate_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change the header, its length, or the data."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    header, body = data[_LENGTH_BYTES : _LENGTH_BYTES + length], data[_LENGTH_BYTES + length :]
    chance = rng.random()
    if chance < 0.7:
        text, told = mutate_json(header.decode(), rng)
        header = text.encode("utf-8", "surrogatepass")
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + body, f"header: {told}"
    if chance < 0.85:
        length = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1))
        return length.to_bytes(_LENGTH_BYTES, "little") + data[
            _LENGTH_BYTES:
        ], "length of the header"
    return data[: rng.randrange(len(data))], "cut"


def mutate_database(file: Path, rng: random.Random) -> str:
    """Change a value of a row, or the tables."""
    try:
        return _mutate_rows(file, rng)
    except sqlite3.Error as error:
        return f"refused: {error}"


def _mutate_rows(file: Path, rng: random.Random) -> str:
    with closing(sqlite3.connect(file)) as connection, connection:
        tables = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        table = rng.choice(tables)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column = rng.choice(columns)
        operation = rng.choice(
            ("value", "value", "value", "document", "drop", "rename", "view", "version")
        )
        if operation == "value":
            value = hostile_value(rng)
            if not isinstance(value, str | bytes) or not _is_text(value):
                value = rng.choice((b"\xff\x00", 1, -1.5, "", None))
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))  # noqa: S608
        elif operation == "document":
            for id_, text in connection.execute("SELECT id, document FROM runs").fetchall():
                changed, _ = mutate_json(text, rng)
                if _is_text(changed):
                    connection.execute("UPDATE runs SET document = ? WHERE id = ?", (changed, id_))
        elif operation == "drop":
            connection.execute(f"DROP TABLE {table}")
        elif operation == "rename":
            connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
        elif operation == "view":
            connection.execute(f"ALTER TABLE {table} RENAME TO hidden")
            endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            chosen = "i AS id, 'a' AS digest, 'b' AS document"
            connection.execute(f"CREATE VIEW {table} AS {endless} SELECT {chosen} FROM n")  # noqa: S608
        else:
            connection.execute(f"PRAGMA application_id = {rng.choice((0, -1, 1))}")
    return f"{operation} of {table}.{column}"


def write_pickle(file: Path, rng: random.Random) -> str:
    """Replace a file by a pickle that runs a command, or that is nested deeply."""
    if rng.random() < 0.5:
        file.write_bytes(pickle.dumps(_RunsCommand(), protocol=rng.choice((2, 4))))
        return "a pickle that runs a command"
    value: object = rng.choice((None, 1, "a", {"a": 1}, {1: 2}, [1, 2]))
    file.write_bytes(pickle.dumps(value, protocol=2))
    return f"a pickle of {value!r}"


class _RunsCommand:
    def __reduce__(self) -> tuple[object, ...]:
        import os

        return (os.system, ("touch executed",))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\ud800" not in value and "\x00" not in value


def parses_as_json(data: bytes) -> bool:
    """Tell a JSON document from other bytes."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
