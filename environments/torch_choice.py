"""Which torch the sessions use: `ASSAY_TORCH=auto|cpu|system`.

Vendor builds of torch are never replaced: where one is used, the environment sees the packages of
the Python that holds it, and pip is held to the very version that is there.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from environments.machine import Accelerator

REQUESTS = ("auto", "cpu", "system")


class TorchBuild(StrEnum):
    """Where a torch comes from."""

    CPU = "cpu"
    REGISTRY = "registry"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """The torch that was chosen, and why in words.

    vendor: the accelerator that it must be able to use; "" if it need not use any.
    """

    build: TorchBuild
    reason: str
    vendor: str = ""


@dataclass(frozen=True, slots=True)
class MachineTorch:
    """A torch that is installed on this machine, outside of the shared environments.

    version: as pip knows it; torch itself names the build as well, as in 2.13.0+cu130.
    folder: the site-packages folder that it lies in.
    accelerator: what it can use now, as torch names it; "" if only the processor.
    """

    version: str
    folder: str
    accelerator: str


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
