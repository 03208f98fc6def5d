"""Table files for spreadsheets and data frames: CSV, XLSX and Parquet."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.foreign_text import escape_cell, one_line

Cell = str | int | float | None

_MOST_XLSX_ROWS = 1 << 20  # Source: Microsoft, "Excel specifications and limits".


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells. Text may be foreign: the formats escape it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def is_table_file(path: str | Path) -> bool:
    """Return True for the name of a table, and False for the name of a folder.

    Raises: UsageError for a name with another suffix, unless it is a folder.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    # `run.v2` and `llama-3.1` are names of folders.
    if suffix not in _FORMATS and suffix[1:].isalpha() and not path.is_dir():
        raise UsageError(f"{path}: a table ends in {', '.join(_FORMATS)}; a folder has no suffix")
    return suffix in _FORMATS


def prepare_table_file(path: Path) -> None:
    """Make the folder of a new table, and check that its format can be written.

    Raises: UsageError if a package is missing, the file exists, or its folder cannot be made.
    """
    package, _ = _FORMATS[path.suffix.lower()]
    if package and find_spec(package) is None:
        raise UsageError(
            f"{path.name}: the package {package} is not installed: pip install 'assay-core[tables]'"
        )
    if path.exists():
        raise UsageError(f"{path} exists: name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder of {path}: {error.strerror}") from error


def format_table(table: Table, suffix: str) -> bytes:
    """Return the content of a table file. suffix: .csv, .xlsx or .parquet."""
    return _FORMATS[suffix.lower()][1](table)


def _format_csv(table: Table) -> bytes:
    stream = io.StringIO()
    # Text is quoted, so that a spreadsheet with another delimiter does not split cells.
    writer = csv.writer(stream, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    for row in (table.columns, *table.rows):
        writer.writerow([escape_cell(cell) if isinstance(cell, str) else cell for cell in row])
    return stream.getvalue().encode()


def _format_xlsx(table: Table) -> bytes:
    if len(table.rows) >= _MOST_XLSX_ROWS:
        raise UsageError(f"{len(table.rows):,} rows are too many for .xlsx: write .csv or .parquet")
    # By name, so that types can be checked without the package.
    openpyxl: Any = import_module("openpyxl")
    new_cell: Any = import_module("openpyxl.cell").WriteOnlyCell
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("tensors")
    sheet.freeze_panes = "A2"
    for row in (table.columns, *table.rows):
        cells = []
        for value in row:
            is_text = isinstance(value, str) or (value is not None and not math.isfinite(value))
            cell = new_cell(sheet, one_line(str(value)) if is_text else value)
            if is_text:
                cell.data_type, cell.quotePrefix = "s", True  # never a formula
            cells.append(cell)
        sheet.append(cells)
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()


def _format_parquet(table: Table) -> bytes:
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    arrays = {}
    for number, name in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        kinds = {type(cell) for cell in cells if cell is not None}
        if str in kinds:
            texts = [None if cell is None else one_line(str(cell)) for cell in cells]
            arrays[name] = arrow.array(texts, arrow.string())
        else:
            arrays[name] = arrow.array(cells, arrow.int64() if kinds == {int} else arrow.float64())
    stream = io.BytesIO()
    parquet.write_table(arrow.table(arrays), stream)
    return stream.getvalue()


# The required package and the writer, by suffix.
_FORMATS: Mapping[str, tuple[str, Callable[[Table], bytes]]] = {
    ".csv": ("", _format_csv),
    ".xlsx": ("openpyxl", _format_xlsx),
    ".parquet": ("pyarrow", _format_parquet),
}
