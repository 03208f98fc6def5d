"""What accelerators the operating system shows, without loading any driver or library."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# PCI class code 0x0300: VGA-compatible controller, a card that drives a screen.
_DISPLAY_CLASS = "0x0300"


@dataclass(frozen=True, slots=True)
class VendorEntry:
    """What runners.toml says of a vendor, as far as installing torch needs it.

    shown_by: patterns below the root of the file system, one of which exists where a driver runs.
    pci_vendor, pci_classes: see runners.toml; "" and () where the patterns alone say enough.
    torch_from_registry: whether the registry's build of torch uses these devices.
    torch_plugin: module that makes torch know them; "" where torch itself does.
    """

    name: str
    title: str
    shown_by: tuple[str, ...]
    pci_vendor: str = ""
    pci_classes: tuple[str, ...] = ()
    torch_from_registry: bool = False
    torch_plugin: str = ""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A vendor's accelerators on this machine.

    evidence: the path that showed them.
    drives_screen: whether they may be no more than the graphics of a laptop or desktop.
    """

    vendor: VendorEntry
    evidence: str
    drives_screen: bool = False


def read_vendors(runners_file: Path) -> list[VendorEntry]:
    """Return the entries of runners.toml, in its order."""
    entries = tomllib.loads(runners_file.read_text(encoding="utf-8"))
    return [_vendor_entry(name, entry) for name, entry in entries.items()]


def _vendor_entry(name: str, entry: Mapping[str, object]) -> VendorEntry:
    shown, torch = entry["shown"], entry["torch"]
    if not isinstance(shown, dict) or not isinstance(torch, dict):
        raise TypeError(f"runners.toml: {name}.shown and {name}.torch must be tables")
    return VendorEntry(
        name=name,
        title=str(entry["title"]),
        shown_by=tuple(shown["by"]),
        pci_vendor=shown.get("pci_vendor", ""),
        pci_classes=tuple(shown.get("pci_classes", ())),
        torch_from_registry=torch["from_registry"],
        torch_plugin=torch.get("plugin", ""),
    )


def visible_accelerators(root: Path, vendors: Sequence[VendorEntry]) -> list[Accelerator]:
    """Return the accelerators whose driver nodes exist below `root`, "/" on a real machine."""
    pci_devices = _pci_devices(root)
    found = []
    for vendor in vendors:
        evidence = _first_match(root, vendor.shown_by)
        if evidence is None:
            continue
        classes = [
            pci_class
            for pci_vendor, pci_class in pci_devices
            if pci_vendor == vendor.pci_vendor and pci_class.startswith(vendor.pci_classes)
        ]
        if vendor.pci_vendor and not classes:
            continue
        drives_screen = bool(classes) and all(c.startswith(_DISPLAY_CLASS) for c in classes)
        found.append(Accelerator(vendor, evidence, drives_screen))
    return found


def _first_match(root: Path, patterns: Sequence[str]) -> str | None:
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            return str(path)
    return None


def _pci_devices(root: Path) -> list[tuple[str, str]]:
    """Vendor and class of every PCI device, such as ("0x1002", "0x030000")."""
    return [
        (_read_word(folder / "vendor"), _read_word(folder / "class"))
        for folder in sorted(root.glob("sys/bus/pci/devices/*"))
    ]


def _read_word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
