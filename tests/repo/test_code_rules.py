"""Rules for every source file: vendor words, length, names, assertions."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

VENDOR_WORD = re.compile(r"(?<![a-z])(cuda|rocm|npu|hpu|xpu|neuron|spyre)(?![a-z])", re.IGNORECASE)

# Code outside of assay/devices that must name a vendor, and why.
VENDOR_WORDS_ALLOWED: dict[str, str] = {}

MAX_LINES = 700
LONG_FILES_ALLOWED: dict[str, str] = {}

VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

# Calls that assert, beside the statement itself.
ASSERTING_CALL = re.compile(
    r"^(assert|check)_|^(raises|warns|fnmatch_lines|no_fnmatch_line|at_most|at_least)$"
)

Find = Callable[[str], list[Path]]


def words_in_code(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and string of `source`, without docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, clean=False) is not None
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        line = getattr(node, "lineno", 0)
        for name in ("id", "attr", "arg", "name", "asname", "module", "value"):
            word = getattr(node, name, None)
            if isinstance(word, str):
                yield line, word


def vendor_words(source: str) -> list[str]:
    return [f"{line}: {word}" for line, word in words_in_code(source) if VENDOR_WORD.search(word)]


def test_vendor_words_stand_only_where_vendors_belong(root: Path, find_files: Find) -> None:
    devices = root / "packages/core/src/assay/devices"
    paths = [*find_files("packages/*/src/*.py"), *find_files("environments/*.py")]
    paths += [root / "noxfile.py"]
    findings = {
        str(path.relative_to(root)): vendor_words(path.read_text(encoding="utf-8"))
        for path in paths
        if devices not in path.parents
    }
    offending = {name: words for name, words in findings.items() if words}
    assert {n: w for n, w in offending.items() if n not in VENDOR_WORDS_ALLOWED} == {}
    assert set(VENDOR_WORDS_ALLOWED) - set(offending) == set(), "no longer needed"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        'device = "cuda:0"',
        "is_npu = True",
        "import torch_npu",
        "from torch import xpu",
        "f(hpu=1)",
        'f"{x} on ROCm"',
    ],
)
def test_a_planted_vendor_word_is_found(line: str) -> None:
    assert vendor_words(line)


@pytest.mark.parametrize("line", ['"""Runs on cuda."""', "# cuda", "input_ids = neurons", "output"])
def test_prose_and_other_words_are_no_vendor_words(line: str) -> None:
    assert vendor_words(line) == []


def test_long_files_have_a_reason(root: Path, find_files: Find) -> None:
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in find_files("*.py")
    }
    long_files = {name for name, length in lengths.items() if length > MAX_LINES}
    assert long_files == set(LONG_FILES_ALLOWED)


def is_vague(path: Path) -> bool:
    return any(part.lower() in VAGUE_NAMES for part in path.with_suffix("").parts)


def test_names_say_what_a_file_holds(root: Path, find_files: Find) -> None:
    assert [path for path in find_files("*") if is_vague(path.relative_to(root))] == []


@pytest.mark.parametrize("name", ["a/utils.py", "helpers/b.py", "common/c.toml"])
def test_a_vague_name_is_found(name: str) -> None:
    assert is_vague(Path(name))


def find_idle_tests(source: str) -> list[str]:
    return [
        f"{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and not any(_asserts(inner) for inner in ast.walk(node))
    ]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return bool(ASSERTING_CALL.search(name))


def test_every_test_asserts_something(root: Path, find_files: Find) -> None:
    findings = {
        str(path.relative_to(root)): find_idle_tests(path.read_text(encoding="utf-8"))
        for path in find_files("*test_*.py")
    }
    assert {name: found for name, found in findings.items() if found} == {}


def test_a_test_without_assertion_is_found() -> None:
    source = (
        "def test_a():\n    run()\n\ndef test_b():\n    with pytest.raises(E):\n        run()\n"
    )
    assert find_idle_tests(source) == ["1: test_a"]


# Calls that one package of core makes for everybody, by what they would do elsewhere.
FILE_READS = re.compile(
    r"tomllib|json\.loads?\([^\n]*\.read_(text|bytes)\(|model_validate_json\([^\n]*\.read_(text|bytes)\("
)
PRINTS = re.compile(
    r"typer\.echo\(|\bConsole\((?!Console)|[^.\w]Environment\(|^ *print\(", re.MULTILINE
)
VERDICTS = re.compile(r"(?<![\w.])Verdict\(")
CALLS_OF = {"files": FILE_READS, "output": PRINTS, "judge": VERDICTS}
# Other programs read what these print, over a pipe of their own.
PRINTS_ALLOWED = {
    "packages/core/src/assay/devices/probe.py",
}


@pytest.mark.parametrize("package", CALLS_OF)
def test_one_package_reads_one_prints_and_one_makes_verdicts(
    root: Path, find_files: Find, package: str
) -> None:
    found = {
        str(path.relative_to(root))
        for path in find_files("packages/*/src/*.py")
        if CALLS_OF[package].search(path.read_text(encoding="utf-8").replace("class Verdict(", ""))
        and root / "packages/core/src/assay" / package not in path.parents
    }
    assert found - (PRINTS_ALLOWED if package == "output" else set()) == set()


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("files", "import tomllib"),
        ("files", "data = json.loads(path.read_text(encoding='utf-8'))"),
        ("files", "Record.model_validate_json(path.read_bytes())"),
        ("output", "typer.echo(text)"),
        ("output", "    print(text)"),
        ("output", "Console(stderr=True).print(table)"),
        ("output", "pages = Environment(autoescape=True)"),
        ("judge", "    return Verdict(verdict=outcome)"),
    ],
)
def test_a_planted_call_is_found(package: str, line: str) -> None:
    assert CALLS_OF[package].search(line)
