"""Accelerators that the operating system shows, and which torch is chosen for which machine (ASSAY_TORCH)."""

import re
import sys
from pathlib import Path

import pytest

from environments.torch_choice import (
    Accelerator,
    MachineTorch,
    TorchBuild,
    TorchUnavailableError,
    VendorEntry,
    choose_torch,
    probe_torch,
    read_vendors,
    visible_accelerators,
)

FROM_REGISTRY = Accelerator(
    VendorEntry("alpha", "Alpha GPU", (), torch_from_registry=True), "/dev/alpha0"
)
OWN_BUILD = Accelerator(VendorEntry("beta", "Beta Card", ()), "/dev/beta0")
SCREEN = Accelerator(VendorEntry("gamma", "Gamma Graphics", ()), "/dev/dri/x", drives_screen=True)

USES_IT = MachineTorch("2.9.0+vendor", "/opt/vendor", "beta")
ONLY_CPU = MachineTorch("2.9.0", "/usr/lib/python3", "")


def test_no_accelerator_gives_the_cpu_build() -> None:
    def never_asked() -> MachineTorch | None:
        raise AssertionError("importing the machine's torch takes seconds")

    choice = choose_torch("auto", [], never_asked)
    assert choice.build is TorchBuild.CPU
    assert choice.vendor == ""


@pytest.mark.parametrize("accelerator", [FROM_REGISTRY, OWN_BUILD, SCREEN])
def test_a_torch_of_the_machine_that_uses_the_accelerator_is_kept(accelerator: Accelerator) -> None:
    choice = choose_torch("auto", [accelerator], lambda: USES_IT)
    assert choice.build is TorchBuild.MACHINE
    assert choice.vendor == accelerator.vendor.title


@pytest.mark.parametrize("machine_torch", [None, ONLY_CPU])
def test_the_registry_build_serves_the_vendor_that_it_carries(
    machine_torch: MachineTorch | None,
) -> None:
    choice = choose_torch("auto", [SCREEN, FROM_REGISTRY], lambda: machine_torch)
    assert choice.build is TorchBuild.REGISTRY
    assert choice.vendor == "Alpha GPU"


def test_an_accelerator_without_its_torch_is_never_tested_on_the_cpu() -> None:
    with pytest.raises(TorchUnavailableError) as raised:
        choose_torch("auto", [OWN_BUILD], lambda: None)
    assert str(raised.value) == (
        "This machine shows Beta Card (/dev/beta0), but the Python that runs nox has no torch.\n"
        "Install the vendor's build of torch (and its driver) for the Python that runs nox, then "
        "run nox again;\n"
        "or set ASSAY_TORCH=cpu to test on the processor only."
    )


def test_a_torch_that_cannot_use_the_accelerator_is_named() -> None:
    with pytest.raises(
        TorchUnavailableError, match=r"torch 2\.9\.0 in /usr/lib/python3 cannot use"
    ):
        choose_torch("auto", [OWN_BUILD, SCREEN], lambda: ONLY_CPU)


@pytest.mark.parametrize("machine_torch", [None, ONLY_CPU])
def test_graphics_that_drive_a_screen_do_not_stop_a_laptop(
    machine_torch: MachineTorch | None,
) -> None:
    choice = choose_torch("auto", [SCREEN], lambda: machine_torch)
    assert choice.build is TorchBuild.CPU
    assert "Gamma Graphics (/dev/dri/x) may only drive a screen" in choice.reason


def test_cpu_is_the_cpu_build_on_any_machine() -> None:
    choice = choose_torch("cpu", [FROM_REGISTRY, OWN_BUILD], lambda: USES_IT)
    assert choice.build is TorchBuild.CPU


@pytest.mark.parametrize("machine_torch", [USES_IT, ONLY_CPU])
def test_system_is_the_torch_of_the_machine_whatever_it_can_use(
    machine_torch: MachineTorch,
) -> None:
    choice = choose_torch("system", [OWN_BUILD], lambda: machine_torch)
    assert choice.build is TorchBuild.MACHINE
    assert choice.vendor == ""


def test_system_without_a_torch_says_where_to_install_it() -> None:
    with pytest.raises(TorchUnavailableError, match="the Python that runs nox has no torch"):
        choose_torch("system", [], lambda: None)


def test_an_unknown_request_names_the_known_ones() -> None:
    with pytest.raises(TorchUnavailableError, match="'gpu' is none of auto, cpu, system"):
        choose_torch("gpu", [], lambda: None)


FAKE_TORCH = """
print("a vendor library greets")
__version__ = "2.9.0+fake"
registered = []
class accelerator:
    @staticmethod
    def current_accelerator(check_available):
        return registered[0] if registered else None
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(FAKE_TORCH, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_torch_without_accelerator_is_probed(site: Path) -> None:
    assert probe_torch(sys.executable, []) == MachineTorch("2.9.0+fake", str(site), "")


def test_version_is_the_one_by_which_pip_can_be_held_to_it(site: Path) -> None:
    """PyPI's builds for CUDA are called 2.9.0 by their metadata and 2.9.0+cu128 by themselves."""
    metadata = site / "torch-2.9.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n", encoding="utf-8")

    assert probe_torch(sys.executable, []) == MachineTorch("2.9.0", str(site), "")


def test_a_plugin_registers_its_accelerator(site: Path) -> None:
    plugin = "import torch, types\ntorch.registered.append(types.SimpleNamespace(type='beta'))\n"
    (site / "torch_beta.py").write_text(plugin, encoding="utf-8")
    beta = Accelerator(VendorEntry("beta", "Beta", (), torch_plugin="torch_beta"), "/dev/beta0")
    assert probe_torch(sys.executable, [beta]) == MachineTorch("2.9.0+fake", str(site), "beta")


def test_a_plugin_that_fails_to_import_gives_no_accelerator(site: Path) -> None:
    (site / "torch_beta.py").write_text("raise OSError('no driver')", encoding="utf-8")
    beta = Accelerator(VendorEntry("beta", "Beta", (), torch_plugin="torch_beta"), "/dev/beta0")
    assert probe_torch(sys.executable, [beta]) == MachineTorch("2.9.0+fake", str(site), "")


@pytest.mark.parametrize("source", ["raise OSError('broken')", "import os; os._exit(139)"])
def test_a_torch_that_cannot_be_imported_is_none(site: Path, source: str) -> None:
    (site / "torch/__init__.py").write_text(source, encoding="utf-8")
    assert probe_torch(sys.executable, []) is None


DISPLAY, COMPUTE, PROCESSING = "0x030000", "0x038000", "0x120000"


# What was seen of a vendor's accelerator: files, and PCI devices. A new vendor needs no line.
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


def made_up_machine(vendor: VendorEntry) -> tuple[list[str], list[tuple[str, str]]]:
    """Return a file that the first pattern of the entry matches, and a device of its first class."""
    node = re.sub(r"\[[^]]+\]|[*?]", "0", vendor.shown_by[0])
    return [node], [(vendor.pci_vendor, one.ljust(8, "0")) for one in vendor.pci_classes[:1]]


def test_a_vendor_without_a_line_is_shown_by_its_entry(tmp_path: Path) -> None:
    vendor = VendorEntry("new", "New", ("dev/new/[0-9]*",), "0x1e52", ("0x1200",))
    nodes, pci = made_up_machine(vendor)
    assert (nodes, pci) == (["dev/new/00"], [("0x1e52", PROCESSING)])
    (found,) = visible_accelerators(make_machine(tmp_path, *nodes, pci=tuple(pci)), [vendor])
    assert found == Accelerator(vendor, str(tmp_path / "dev/new/00"))


@pytest.mark.parametrize("vendor", CONFIGURED, ids=lambda vendor: vendor.name)
def test_an_accelerator_with_a_driver_is_shown(tmp_path: Path, vendor: VendorEntry) -> None:
    if not vendor.shown_by:
        assert vendor.name == "cpu"
        return
    nodes, pci = MACHINES.get(vendor.name) or made_up_machine(vendor)
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
