"""What counts as an accelerator that the operating system shows."""

from pathlib import Path

import pytest

from environments.machine import Accelerator, VendorEntry, read_vendors, visible_accelerators

DISPLAY, COMPUTE, PROCESSING = "0x030000", "0x038000", "0x120000"


# What shows the accelerator of each vendor: files, and PCI devices.
MACHINES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "nvidia": (["dev/nvidia0", "dev/nvidiactl"], []),
    "amd": (["dev/kfd"], [("0x1002", PROCESSING)]),
    "intel": (["dev/dri/renderD128"], [("0x8086", COMPUTE)]),
    "gaudi": (["dev/accel/accel0"], [("0x1da3", PROCESSING)]),
    "spyre": (["dev/vfio/12"], [("0x1014", PROCESSING)]),
    "trainium": (["dev/neuron0"], []),
    "ascend": (["dev/davinci0"], []),
    "apple": (["System/Library/Extensions/AGXMetalG13X.bundle"], []),
}
ROOT = Path(__file__).resolve().parents[2]
CONFIGURED = read_vendors(ROOT / "runners/runners.toml")


@pytest.fixture(scope="module")
def vendors() -> list[VendorEntry]:
    return read_vendors(ROOT / "packages/runners/tests/runners.toml")


def make_machine(root: Path, *nodes: str, pci: tuple[tuple[str, str], ...] = ()) -> Path:
    for node in nodes:
        (root / node).parent.mkdir(parents=True, exist_ok=True)
        (root / node).touch()
    for number, (vendor, pci_class) in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n", encoding="ascii")
        (folder / "class").write_text(f"{pci_class}\n", encoding="ascii")
    return root


@pytest.mark.parametrize("vendor", CONFIGURED, ids=lambda vendor: vendor.name)
def test_an_accelerator_with_a_driver_is_shown(tmp_path: Path, vendor: VendorEntry) -> None:
    if not vendor.shown_by:
        assert vendor.name == "cpu"
        return
    nodes, pci = MACHINES[vendor.name]
    (found,) = visible_accelerators(make_machine(tmp_path, *nodes, pci=tuple(pci)), CONFIGURED)
    assert found == Accelerator(vendor, str(tmp_path / nodes[0]))


def test_the_windows_subsystem_shows_its_library(
    tmp_path: Path, vendors: list[VendorEntry]
) -> None:
    machine = make_machine(tmp_path, "usr/lib/wsl/lib/libcuda.so.1")
    assert [one.vendor.name for one in visible_accelerators(machine, vendors)] == ["nvidia"]


@pytest.mark.parametrize(
    ("vendor", "node", "pci_vendor"),
    [("intel", "dev/dri/renderD128", "0x8086"), ("amd", "dev/kfd", "0x1002")],
)
def test_graphics_of_a_laptop_may_only_drive_its_screen(
    tmp_path: Path, vendors: list[VendorEntry], vendor: str, node: str, pci_vendor: str
) -> None:
    machine = make_machine(tmp_path, node, pci=((pci_vendor, DISPLAY),))
    (found,) = visible_accelerators(machine, vendors)
    assert found.vendor.name == vendor
    assert found.drives_screen


def test_a_screen_beside_an_accelerator_of_the_same_vendor_does_not_hide_it(
    tmp_path: Path, vendors: list[VendorEntry]
) -> None:
    pci = (("0x1002", DISPLAY), ("0x1002", PROCESSING))
    (found,) = visible_accelerators(make_machine(tmp_path, "dev/kfd", pci=pci), vendors)
    assert not found.drives_screen


@pytest.mark.parametrize(
    ("nodes", "pci"),
    [
        ([], []),
        ([], [("0x10de", DISPLAY)]),  # no driver: no torch could use it
        (["dev/nvidiactl"], []),  # a driver without a device
        (["dev/vfio/12"], [("0x10de", PROCESSING)]),  # a device handed to a virtual machine
        (["dev/accel/accel0"], [("0x8086", PROCESSING)]),  # the NPU of a laptop
        (["dev/dri/renderD128"], [("0x1234", DISPLAY)]),  # the screen of a virtual machine
    ],
)
def test_what_is_no_accelerator_is_not_shown(
    tmp_path: Path, vendors: list[VendorEntry], nodes: list[str], pci: list[tuple[str, str]]
) -> None:
    machine = make_machine(tmp_path, *nodes, pci=tuple(pci))
    assert visible_accelerators(machine, vendors) == []


def test_vendors_are_distinguished_on_one_machine(
    tmp_path: Path, vendors: list[VendorEntry]
) -> None:
    machine = make_machine(
        tmp_path, "dev/nvidia0", "dev/dri/renderD128", pci=(("0x8086", DISPLAY),)
    )
    found = visible_accelerators(machine, vendors)
    assert [(one.vendor.name, one.drives_screen) for one in found] == [
        ("nvidia", False),
        ("intel", True),
    ]


def test_the_plugin_of_a_vendor_is_read(vendors: list[VendorEntry]) -> None:
    plugins = {vendor.name: vendor.torch_plugin for vendor in vendors}
    assert plugins["spyre"] == "torch_spyre"
    assert plugins["nvidia"] == ""
