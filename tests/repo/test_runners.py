"""runners.toml agrees with the device adapters of all packages."""

import ast
import json
import re
from pathlib import Path

from assay.files import read_toml
from assay_runners.fleet import read_fleet


def test_labels_of_device_adapters_are_those_of_the_vendors_of_smoke(root: Path) -> None:
    tables = read_toml(root / "packages/smoke/src/assay_smoke/matrix/vendors.toml")
    named = {
        node.value
        for path in sorted(root.glob("packages/*/src/**/devices/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"assay-[a-z0-9-]+", str(node.value))
    }
    assert named == {f"assay-{vendor}" for vendor in tables}


def test_the_night_asks_bench_the_questions_of_its_baselines(root: Path) -> None:
    files = sorted(root.glob("packages/bench/src/assay_bench/shipped/*.json"))
    facts = [json.loads(file.read_text(encoding="utf-8"))["facts"] for file in files]
    pythons = {fact["versions"]["python"] for fact in facts}
    assert pythons == {read_fleet(root).github.bench_python}


def test_every_vendor_has_a_device_adapter(root: Path) -> None:
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(root.glob("packages/core/src/assay/devices/**/*.py"))
    )
    vendors = [vendor.name for vendor in read_fleet(root).vendors]
    assert vendors
    assert [name for name in vendors if f'"assay-{name}"' not in text] == []
