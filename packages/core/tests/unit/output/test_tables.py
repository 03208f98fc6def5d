"""Tables as files, with text that a spreadsheet would take for something else."""

import csv
import importlib
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest

from assay.errors import UsageError
from assay.output import tables
from assay.output.tables import Table, format_table, is_table_file, prepare_table_file

TABLE = Table(
    ("module", "count", "error", "message"),
    [
        ("=HYPERLINK(1)", 1, -0.5, None),
        ("a\x1b[2J\nb", 2, math.nan, "-"),
        ('quote " and , ; comma', 3, -math.inf, "\ud800"),
    ],
)


def test_csv_holds_escaped_text_and_all_digits() -> None:
    text = format_table(TABLE, ".csv").decode()
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == ["module", "count", "error", "message"]
    assert rows[1] == ["'=HYPERLINK(1)", "1", "-0.5", ""]
    assert rows[2] == [r"a\u001b[2J\nb", "2", "nan", "'-"]
    assert rows[3] == ['quote " and , ; comma', "3", "-inf", r"\ud800"]
    assert repr(0.1 + 0.2) in format_table(Table(("x",), [(0.1 + 0.2,)]), ".csv").decode()


def test_csv_quotes_text_whatever_the_delimiter_of_the_reader() -> None:
    text = format_table(Table(("x",), [("a;=1+1",)]), ".csv").decode()
    assert text == '"x"\n"a;=1+1"\n'


def test_xlsx_holds_text_and_no_formula() -> None:
    pytest.importorskip("openpyxl", reason="openpyxl is not installed")
    openpyxl: Any = importlib.import_module("openpyxl")
    sheet = openpyxl.load_workbook(io.BytesIO(format_table(TABLE, ".xlsx")))["tensors"]
    cells = [[(cell.value, cell.data_type) for cell in row] for row in sheet.iter_rows()]
    assert cells[0][0] == ("module", "s")
    assert cells[1] == [("=HYPERLINK(1)", "s"), (1, "n"), (-0.5, "n"), (None, "n")]
    assert cells[2] == [(r"a\u001b[2J\nb", "s"), (2, "n"), ("nan", "s"), ("-", "s")]
    assert cells[3][2:] == [("-inf", "s"), (r"\ud800", "s")]
    assert sheet["A2"].quotePrefix  # a later edit of the cell makes no formula of it either


def test_parquet_holds_typed_columns() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    read = parquet.read_table(io.BytesIO(format_table(TABLE, ".parquet")))
    assert [str(one) for one in read.schema.types] == ["string", "int64", "double", "string"]
    assert read.column("module").to_pylist()[0] == "=HYPERLINK(1)"
    assert read.column("error").to_pylist()[2] == -math.inf
    assert read.column("message").to_pylist() == [None, "-", r"\ud800"]


@pytest.mark.parametrize(
    ("cells", "kind", "read"),
    [
        ([1, "x", None], "string", ["1", "x", None]),
        ([1, 0.5], "double", [1.0, 0.5]),
        ([None, None], "double", [None, None]),
        ([], "double", []),
    ],
)
def test_a_parquet_column_has_one_type(cells: list[Any], kind: str, read: list[Any]) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    written = format_table(Table(("x",), [(cell,) for cell in cells]), ".parquet")
    column = parquet.read_table(io.BytesIO(written)).column("x")
    assert (str(column.type), column.to_pylist()) == (kind, read)


@pytest.mark.parametrize("name", ["x.csv", "x.xlsx", "x.PARQUET", "a.b/x.csv"])
def test_a_table_is_known_by_its_suffix(name: str) -> None:
    assert is_table_file(name)


@pytest.mark.parametrize("name", ["runs/1", "csv", "llama-3.1", "run.v2", ".hidden"])
def test_another_name_is_that_of_a_folder(name: str) -> None:
    assert not is_table_file(name)


@pytest.mark.parametrize("name", ["x.txt", "x.TSV", "x.csv.gz", "out/x.json"])
def test_the_name_of_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"a table ends in \.csv, \.xlsx, \.parquet; a folder"):
        is_table_file(tmp_path / name)
    (tmp_path / name).mkdir(parents=True)
    assert not is_table_file(tmp_path / name)


@pytest.mark.parametrize(("suffix", "package"), [("xlsx", "openpyxl"), ("parquet", "pyarrow")])
def test_an_absent_package_is_named_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str
) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None if name == package else object())
    message = (
        f"x.{suffix}: the package {package} is not installed: pip install 'assay-core[tables]'"
    )
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        prepare_table_file(tmp_path / f"x.{suffix}")
    prepare_table_file(tmp_path / "x.csv")


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("precious")
    with pytest.raises(UsageError, match=r"x\.csv exists: name another file$"):
        prepare_table_file(tmp_path / "x.csv")


def test_the_folder_of_a_table_is_made(tmp_path: Path) -> None:
    prepare_table_file(tmp_path / "new" / "x.csv")
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the folder of .*x\.csv: Not a directory"):
        prepare_table_file(tmp_path / "file" / "x" / "x.csv")


def test_a_sheet_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_XLSX_ROWS", 3)
    with pytest.raises(UsageError, match=r"^3 rows are too many for \.xlsx: write \.csv or"):
        format_table(TABLE, ".xlsx")
