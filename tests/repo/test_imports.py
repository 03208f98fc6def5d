"""Imports go down the layers and between packages in one direction, and never in a cycle."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# `assay` itself and `python -m assay` offer what all layers have.
EDGES = ("__init__", "__main__")


@dataclass(frozen=True)
class Layers:
    """The layer of every part, and the order of the parts on layers that have one."""

    layer_of: Mapping[str, int]
    orders: tuple[tuple[str, ...], ...]

    def allows(self, importer: str, imported: str) -> bool:
        if importer in (*EDGES, imported):
            return True
        if imported in EDGES:
            return False
        higher, lower = self.layer_of[importer], self.layer_of[imported]
        if higher != lower:
            return higher > lower
        return any(
            importer in order and imported in order[: order.index(importer)]
            for order in self.orders
        )


def read_layers(architecture: str) -> Layers:
    section = architecture.split("## Layers of core")[1].split("\n## ", maxsplit=1)[0]
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", section, re.MULTILINE)
    layer_of = {
        part.rstrip("/"): int(layer)
        for layer, parts in rows
        for part in re.findall(r"`([^`]+)`", parts)
    }
    sentences = re.findall(r"in the order\s+`([^`]+)`", section)
    return Layers(layer_of, tuple(tuple(s.replace(",", " ").split()) for s in sentences))


def imported_modules(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that `path` imports from `package`, lazily or not."""
    for line, name in all_imports(path):
        if f"{name}.".startswith(f"{package}."):
            yield line, name


@cache
def all_imports(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything that `path` imports. Three tests read every file of the packages."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are banned"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return found


def part_of(dotted_name: str, source: Path) -> str:
    """The part that "assay.PART.more" lies in; "__init__" for what `assay` itself defines."""
    part = dotted_name.split(".")[1] if "." in dotted_name else ""
    is_part = (source / part).is_dir() or (source / f"{part}.py").is_file()
    return part if part and is_part else "__init__"


def forbidden_imports(source: Path, layers: Layers) -> list[str]:
    findings = []
    for path in sorted(source.rglob("*.py")):
        importer = path.relative_to(source).parts[0].removesuffix(".py")
        for line, name in imported_modules(path, "assay"):
            imported = part_of(name, source)
            unknown = {importer, imported} - {*layers.layer_of, *EDGES}
            if unknown:
                findings.append(f"{path}:{line}: {', '.join(sorted(unknown))} is on no layer")
            elif not layers.allows(importer, imported):
                findings.append(f"{path}:{line}: {importer} must not import {imported}")
    return findings


@pytest.fixture(scope="module")
def architecture(root: Path) -> str:
    return (root / "docs/architecture.md").read_text(encoding="utf-8")


def test_core_imports_only_downward(root: Path, architecture: str) -> None:
    source = root / "packages/core/src/assay"
    assert forbidden_imports(source, read_layers(architecture)) == []


def test_the_layers_are_read_from_the_document(architecture: str) -> None:
    layers = read_layers(architecture)
    assert layers.layer_of["errors"] == 0
    assert layers.layer_of["trace"] == 2
    assert layers.layer_of["cli"] == 6
    assert layers.orders[0][:3] == ("errors", "option_ranges", "dtypes")


@pytest.mark.parametrize(
    ("file", "statement", "finding"),
    [
        ("errors.py", "import assay.report", "errors must not import report"),
        ("errors.py", "from assay import report", "errors must not import report"),
        ("errors.py", "from assay.report import html", "errors must not import report"),
        ("errors.py", "def f():\n    import assay.report.html", "errors must not import report"),
        ("trace/store.py", "from assay.devices import base", "trace must not import devices"),
        ("trace/store.py", "from assay import capture", "trace must not import __init__"),
        ("errors.py", "import assay.dtypes", "errors must not import dtypes"),
        ("tools/x.py", "import assay.errors", "tools is on no layer"),
    ],
)
def test_a_planted_import_is_found(
    tmp_path: Path, architecture: str, file: str, statement: str, finding: str
) -> None:
    for part in ("errors", "dtypes", "trace", "devices", "report"):
        (tmp_path / part).mkdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(statement, encoding="utf-8")
    (found,) = forbidden_imports(tmp_path, read_layers(architecture))
    assert found.endswith(finding)


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("dtypes.py", "from assay.errors import UsageError"),
        ("trace/store.py", "import assay.trace.layout"),
        ("trace/store.py", "from assay.errors import AssayError"),
        ("report/html.py", "from assay import trace"),
        ("__init__.py", "from assay.report import html"),
        ("trace/store.py", "import assaying"),
    ],
)
def test_an_import_that_goes_down_is_allowed(
    tmp_path: Path, architecture: str, file: str, statement: str
) -> None:
    for part in ("errors", "dtypes", "trace", "report"):
        (tmp_path / part).mkdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(statement, encoding="utf-8")
    assert forbidden_imports(tmp_path, read_layers(architecture)) == []


def read_package_directions(architecture: str) -> dict[str, set[str]]:
    """Import name of every package, and of those that it may import."""
    rows = re.findall(
        r"^\| `packages/(\w+)` \| `(\w+)` \| [^|]+ \| ([^|]+) \|$", architecture, re.MULTILINE
    )
    names = {folder: name for folder, name, _ in rows}
    return {
        name: {names[folder] for folder in re.findall(r"\w+", allowed)} for _, name, allowed in rows
    }


def forbidden_packages(source: Path, package: str, allowed: set[str], known: set[str]) -> list[str]:
    return [
        f"{path}:{line}: {package} must not import {name}"
        for other in sorted(known - allowed - {package})
        for path in sorted(source.rglob("*.py"))
        for line, name in imported_modules(path, other)
    ]


def test_packages_import_in_one_direction(root: Path, architecture: str) -> None:
    directions = read_package_directions(architecture)
    assert directions["assay_smoke"] == {"assay"}
    assert directions["assay"] == set()
    findings = []
    for package, allowed in directions.items():
        (source,) = root.glob(f"packages/*/src/{package}")
        findings += forbidden_packages(source, package, allowed, set(directions))
    assert findings == []


def test_a_planted_import_between_packages_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import assay_bench.jobs", encoding="utf-8")
    (found,) = forbidden_packages(tmp_path, "assay", set(), {"assay", "assay_bench"})
    assert found.endswith("x.py:1: assay must not import assay_bench.jobs")


def file_of(dotted_name: str, source: Path) -> Path | None:
    """The file of "assay.part.file.name", relative to `source`; None if it lies elsewhere."""
    parts = dotted_name.split(".")
    for count in range(len(parts), 0, -1):
        path = Path(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (source / file).is_file():
                return file
    return None


def import_cycles(source: Path, package: str) -> list[str]:
    """For each folder its files and sub-folders that import each other in a circle.

    A sub-folder imports what any file in it imports: files of two folders that import each other are
    a cycle of the folders.
    """
    graphs: dict[Path, dict[str, set[str]]] = {}
    for file in sorted((source / package).rglob("*.py")):
        importer = file.relative_to(source)
        for _, name in imported_modules(file, package):
            imported = file_of(name, source)
            if imported is None or imported == importer:
                continue
            pairs = enumerate(zip(importer.parts, imported.parts, strict=False))
            depth, (ours, theirs) = next((n, pair) for n, pair in pairs if len(set(pair)) > 1)
            graph = graphs.setdefault(Path(*importer.parts[:depth]), {})
            graph.setdefault(ours, set()).add(theirs)
    findings = []
    for folder, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            findings.append(f"{folder}: {' <- '.join(error.args[1])}")
    return findings


def test_nothing_is_imported_in_a_cycle(root: Path) -> None:
    sources = sorted(root.glob("packages/*/src/*"))
    assert len(sources) == 5
    assert [found for path in sources for found in import_cycles(path.parent, path.name)] == []


@pytest.mark.parametrize(
    ("files", "folder", "names"),
    [
        (
            {"part/a.py": "import assay.part.b", "part/b.py": "from assay.part import a"},
            "assay/part",
            {"a.py", "b.py"},
        ),
        (
            {
                "part/a.py": "def f():\n    import assay.part.b",
                "part/b.py": "if TYPE_CHECKING:\n    from assay.part.a import A",
            },
            "assay/part",
            {"a.py", "b.py"},
        ),
        (
            {"__init__.py": "from assay.part import a", "part/a.py": "from assay import capture"},
            "assay",
            {"__init__.py", "part"},
        ),
        (
            {
                "part/state/a.py": "import assay.part.replay.b",
                "part/state/c.py": "",
                "part/replay/b.py": "from assay.part.replay import d",
                "part/replay/d.py": "from assay.part.state.c import C",
            },
            "assay/part",
            {"state", "replay"},
        ),
    ],
    ids=["files", "lazy and for types", "package", "folders"],
)
def test_a_planted_cycle_is_found(
    tmp_path: Path, files: dict[str, str], folder: str, names: set[str]
) -> None:
    for name, text in files.items():
        (tmp_path / "assay" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "assay" / name).write_text(text, encoding="utf-8")

    (found,) = import_cycles(tmp_path, "assay")

    assert found.startswith(f"{folder}: ")
    assert set(found.removeprefix(f"{folder}: ").split(" <- ")) == names
