"""Which accelerators the operating system shows, and which torch the sessions use: `ASSAY_TORCH=auto|cpu|system`.

No driver or library is loaded to see an accelerator. Vendor builds of torch are never replaced: where one is used, the
environment sees the packages of the Python that holds it, and pip keeps the version that is there.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# PCI class code 0x0300: VGA-compatible controller, a card that drives a screen.
_DISPLAY_CLASS = "0x0300"


@dataclass(frozen=True, slots=True)
class VendorEntry:
    """The facts about a vendor in runners.toml that the choice of torch depends on."""

    name: str
    title: str
    shown_by: tuple[str, ...]
    """Patterns below the root of the file system, one of which exists where a driver runs."""
    pci_vendor: str = ""
    pci_classes: tuple[str, ...] = ()
    """As in runners.toml; "" and () where the patterns alone say enough."""
    torch_from_registry: bool = False
    """The registry's build of torch uses these devices."""
    torch_plugin: str = ""
    """Module that registers them with torch; "" where torch itself does."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A vendor's accelerators on this machine."""

    vendor: VendorEntry
    evidence: str
    """The path that showed them."""
    drives_screen: bool = False
    """They may only be the graphics of a laptop or desktop."""


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
    """Return vendor and class of every PCI device, such as ("0x1002", "0x030000")."""
    return [
        (_read_word(folder / "vendor"), _read_word(folder / "class"))
        for folder in sorted(root.glob("sys/bus/pci/devices/*"))
    ]


def _read_word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


REQUESTS = ("auto", "cpu", "system")


class TorchBuild(StrEnum):
    """Where a torch comes from."""

    CPU = "cpu"
    REGISTRY = "registry"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """The torch that was chosen, and why in words."""

    build: TorchBuild
    reason: str
    vendor: str = ""
    """The accelerator that it must be able to use; "" if it need not use any."""


@dataclass(frozen=True, slots=True)
class MachineTorch:
    """A torch that is installed on this machine, outside of the shared environments."""

    version: str
    """As pip knows it; torch itself names the build as well, as in 2.13.0+cu130."""
    folder: str
    """Its site-packages folder."""
    accelerator: str
    """The device type that it can use now, as torch names it; "" if only the processor."""


class TorchUnavailableError(Exception):
    """No torch can be had that does what was asked; the message says what to do."""


def choose_torch(
    request: str,
    accelerators: Sequence[Accelerator],
    find_machine_torch: Callable[[], MachineTorch | None],
) -> TorchChoice:
    """Choose the torch for `request`, given what the operating system shows.

    find_machine_torch: called only where the answer depends on it; importing torch takes seconds.

    Raises: TorchUnavailableError if there is none; it is never a silent CPU run on a machine with
        accelerators.
    """
    match request:
        case "cpu":
            return TorchChoice(TorchBuild.CPU, "ASSAY_TORCH=cpu")
        case "system":
            return _choose_system(find_machine_torch())
        case "auto":
            return _choose_automatically(accelerators, find_machine_torch)
    raise TorchUnavailableError(f"ASSAY_TORCH={request!r} is none of {', '.join(REQUESTS)}.")


def _choose_system(machine_torch: MachineTorch | None) -> TorchChoice:
    if machine_torch is None:
        raise TorchUnavailableError(
            "ASSAY_TORCH=system, but the Python that runs nox has no torch.\n"
            "Install torch there, or run nox with the Python that has it (python -m nox)."
        )
    return TorchChoice(
        TorchBuild.MACHINE, f"ASSAY_TORCH=system: torch {machine_torch.version} of this machine"
    )


def _choose_automatically(
    accelerators: Sequence[Accelerator],
    find_machine_torch: Callable[[], MachineTorch | None],
) -> TorchChoice:
    if not accelerators:
        return TorchChoice(TorchBuild.CPU, "the operating system shows no accelerator")
    machine_torch = find_machine_torch()
    shown = ", ".join(f"{found.vendor.title} ({found.evidence})" for found in accelerators)
    if machine_torch is not None and machine_torch.accelerator:
        return TorchChoice(
            TorchBuild.MACHINE,
            f"torch {machine_torch.version} of this machine uses {machine_torch.accelerator}: "
            f"{shown}",
            vendor=accelerators[0].vendor.title,
        )
    for found in accelerators:
        if found.vendor.torch_from_registry:
            return TorchChoice(
                TorchBuild.REGISTRY, f"the registry's build: {shown}", vendor=found.vendor.title
            )
    if all(found.drives_screen for found in accelerators):
        return TorchChoice(
            TorchBuild.CPU,
            f"{shown} may only drive a screen, and this machine has no torch that uses it; to test "
            "it, install its vendor's torch in the Python that runs nox",
        )
    raise TorchUnavailableError(_no_vendor_torch(shown, machine_torch))


def _no_vendor_torch(shown: str, machine_torch: MachineTorch | None) -> str:
    have = (
        "the Python that runs nox has no torch"
        if machine_torch is None
        else f"torch {machine_torch.version} in {machine_torch.folder} cannot use it"
    )
    return (
        f"This machine shows {shown}, but {have}.\n"
        "Install the vendor's build of torch (and its driver) for the Python that runs nox, then "
        "run nox again;\nor set ASSAY_TORCH=cpu to test on the processor only."
    )


# A first import of torch on a cold network disk takes a minute; a hung driver takes for ever.
_PROBE_SECONDS = 300

# Run by the Python in question. Vendors' plug-ins register themselves with torch when they are
# imported; a plug-in that imports and registers no accelerator drives it in its own way (XLA).
_PROBE = """
import importlib, importlib.metadata, json, os, sys
try:
    import torch
except Exception:
    print("null")
    sys.exit()
plugins = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        plugins.append(name)
    except Exception:
        pass
try:
    found = torch.accelerator.current_accelerator(check_available=True)
except Exception:
    found = None
folder, version = os.path.dirname(os.path.dirname(torch.__file__)), torch.__version__
try:
    installed = importlib.metadata.distribution("torch")
    if os.path.samefile(installed.locate_file(""), folder):
        version = installed.version
except (importlib.metadata.PackageNotFoundError, OSError):
    pass
print(json.dumps({
    "version": version,
    "folder": folder,
    "accelerator": found.type if found is not None else (plugins or [""])[0],
}))
"""


def probe_torch(python: str, accelerators: Sequence[Accelerator]) -> MachineTorch | None:
    """Return what the torch of `python` can use, or None if it has no torch that can be imported."""
    plugins = [found.vendor.torch_plugin for found in accelerators if found.vendor.torch_plugin]
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE, *plugins],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    # Vendor libraries print on import; the answer is the last line.
    lines = answer.stdout.splitlines()
    if answer.returncode != 0 or not lines:
        return None
    found: Mapping[str, str] | None = json.loads(lines[-1])
    return MachineTorch(**found) if found is not None else None


def find_machine_torch(accelerators: Sequence[Accelerator]) -> MachineTorch | None:
    """Find the torch of the Python that runs nox, else of the one that its environment is made from."""
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", ""))):
        found = probe_torch(python, accelerators) if python else None
        if found is not None:
            return found
    return None
