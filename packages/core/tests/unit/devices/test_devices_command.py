"""`assay devices` prints the result of `list_devices`, as a table or as JSON."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from assay.cli.application import devices
from assay.devices import detection
from assay.devices.base import DeviceVendor
from assay.devices.detection import ListedDevice
from assay.devices.registry import adapter_names, detect

ACME = DeviceVendor(
    "acme", "Acme Rocket", "gloo", "eager", ("assay-acme", "assay-fast"), verified="Rocket 1"
)
LINES = (
    ListedDevice("acme", "present", ACME, ("Rocket", "Rocket", "Pad"), ("0", "1", "2")),
    ListedDevice("npu", "absent", DeviceVendor("ascend", "Huawei Ascend", "hccl", "npu", ("l",)), missing="a chip"),
    ListedDevice("bad", "broken", missing="the adapter for 'bad' is broken: [red]boom[/red]"),
)  # fmt: skip


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(detection, "list_devices", lambda timeout: LINES)
    monkeypatch.setenv("COLUMNS", "100")
    app = typer.Typer()
    app.command()(devices)
    return app


def test_json_is_all_that_is_printed(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0
    printed = json.loads(result.output)
    assert printed["schema"] == 1
    assert [line["device"] for line in printed["devices"]] == ["acme", "npu", "bad"]
    assert printed["devices"][0] == {
        "device": "acme",
        "status": "present",
        "vendor": "acme",
        "title": "Acme Rocket",
        "count": 3,
        "products": ["Rocket", "Rocket", "Pad"],
        "variants": ["0", "1", "2"],
        "missing": "",
        "distributed_backend": "gloo",
        "compile_backend": "eager",
        "runner_labels": ["assay-acme", "assay-fast"],
        "verified": "Rocket 1",
    }
    assert printed["devices"][2]["vendor"] is None


def test_table_shows_names_to_use_and_what_is_missing(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    printed = [" ".join(line.split()) for line in result.output.splitlines()]
    assert printed == [
        "DEVICE VENDOR STATUS VERIFIED DISTRIBUTED COMPILE",
        "acme Acme Rocket present Rocket 1 gloo eager",
        "npu Huawei Ascend absent no hccl npu",
        "bad ? broken ? ? ?",
        "",
        "VENDOR RUNNER LABELS FOUND OR MISSING",
        "Acme Rocket assay-acme, assay-fast 2 x Rocket, Pad: acme:0 acme:1 acme:2",
        "Huawei Ascend l a chip",
        "bad ? the adapter for 'bad' is broken: [red]boom[/red]",
    ]


def test_no_name_is_broken_at_80_columns(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = [one.vendor for kind in adapter_names() for one in detect(kind)]
    lines = tuple(ListedDevice("spyre", "present", one, ("card",)) for one in shipped)
    monkeypatch.setattr(detection, "list_devices", lambda timeout: lines)
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, []).output
    assert len(shipped) > 8
    for vendor in shipped:
        for name in (vendor.title, *vendor.runner_labels, vendor.compile_backend):
            assert name in printed


def test_command_is_loaded_without_torch() -> None:
    code = "import sys, assay.cli.application; print('torch' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
