"""Find and open devices by name, from built-in adapters and those of other packages.

An adapter is an entry point of the group `assay.devices`. Its name is the part of a device name before
the colon. This module runs adapters in the calling process; `assay.devices.detection` runs
them in another one, because a vendor's software may hang or crash.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from assay.devices.base import Detection, Device, make_absent_error
from assay.devices.run_string import Run, parse_device, suggest_device
from assay.errors import AssayError, MachineError, UsageError

GROUP = "assay.devices"
_OWN_ADAPTERS = "assay.devices."

_MEMBERS = tuple(name for name in vars(Device) if not name.startswith("_"))


def make_broken_adapter_error(kind: str, problem: object) -> MachineError:
    """Make the error from the exception that the adapter raised, or from a clause."""
    if isinstance(problem, BaseException):
        problem = f"{type(problem).__name__}: {problem}"
    return MachineError(f"the adapter for {kind!r} is broken: {problem}")


def adapter_names() -> tuple[str, ...]:
    """List all installed adapters, including broken ones."""
    return tuple(sorted({entry_point.name for entry_point in entry_points(group=GROUP)}))


def is_own_adapter(kind: str) -> bool:
    """Return True if every adapter called `kind` is part of this package."""
    return all(found.value.startswith(_OWN_ADAPTERS) for found in _registered(kind))


def is_host_adapter(kind: str) -> bool:
    """Return True for an adapter of this package that computes on the host and loads no driver.

    Raises: UsageError.
    """
    return is_own_adapter(kind) and getattr(load_adapter(kind), "torch_device", None) == "cpu"


def find_adapter(kind: str) -> EntryPoint:
    """Find the adapter called `kind` without loading it. Raises: UsageError, MachineError."""
    found = _registered(kind)
    if not found:
        hint = suggest_device(kind) or (
            f"there is: {', '.join(adapter_names())}. "
            f"Others come with a package that registers an adapter (entry-point group {GROUP})"
        )
        raise UsageError(f"unknown device {kind!r}; {hint}")
    if len(found) > 1:
        values = ", ".join(entry_point.value for entry_point in found)
        raise MachineError(f"the adapter for {kind!r} is registered more than once: {values}")
    return found[0]


def load_adapter(kind: str) -> type[Device]:
    """Load the adapter class called `kind`. Raises: UsageError, MachineError."""
    found = find_adapter(kind)
    try:
        adapter: type[Device] = found.load()
    except (Exception, SystemExit) as error:
        raise make_broken_adapter_error(kind, error) from error
    if not callable(getattr(adapter, "detect", None)):
        raise make_broken_adapter_error(kind, "it lacks detect")
    return adapter


def detect(kind: str) -> tuple[Detection, ...]:
    """Detect the devices of the adapter called `kind`.

    Raises: as `load_adapter`; MachineError if the adapter raises or returns other objects.
    """
    adapter = load_adapter(kind)
    try:
        detections: tuple[Any, ...] = tuple(adapter.detect())
    except (Exception, SystemExit) as error:
        raise make_broken_adapter_error(kind, error) from error
    for detection in detections:
        if not isinstance(detection, Detection):
            wrong = TypeError(f"detect() must return detections, not {detection!r}")
            raise make_broken_adapter_error(kind, wrong)
    if not detections:
        raise make_broken_adapter_error(kind, ValueError("detect() returned nothing"))
    return detections


def open_device(text: str) -> Device:
    """Open the device called `text`, such as "cpu", "cuda:1" or "sim:fp8".

    Raises: UsageError for an unknown name; MachineError if this machine lacks the device or its
        adapter cannot open it.
    """
    name = parse_device(text)
    detections = detect(name.kind)
    if not any(detection.present for detection in detections):
        missing = "; or ".join(detection.missing for detection in detections)
        # Detecting other vendors' devices would import their software, which may hang.
        host = [kind for kind in adapter_names() if is_own_adapter(kind) and is_host_adapter(kind)]
        here = f"{', '.join(host)} (`assay devices` shows all)"
        raise make_absent_error(text, missing, here)
    try:
        device = load_adapter(name.kind)(name.variant)
    except AssayError:
        raise
    except Exception as error:
        raise make_broken_adapter_error(name.kind, error) from error
    lacking = [member for member in _MEMBERS if not hasattr(device, member)]
    if lacking:
        raise make_broken_adapter_error(name.kind, f"it lacks {', '.join(lacking)}")
    return device


def open_run(run: Run) -> Device:
    """Open the device of `run`. Raises: as `open_device`; UsageError."""
    device = open_device(run.device)
    try:
        supported = tuple(device.supported_dtypes())
    except Exception as error:
        raise make_broken_adapter_error(parse_device(run.device).kind, error) from error
    if run.dtype not in supported:
        names = ", ".join(supported)
        raise UsageError(f"{run.device} has no {run.dtype}; it has: {names}")
    return device


def _registered(kind: str) -> list[EntryPoint]:
    """Return the entry points called `kind`; one that is on the path twice counts once."""
    found = {
        entry_point.value: entry_point
        for entry_point in entry_points(group=GROUP)
        if entry_point.name == kind
    }
    return list(found.values())


def describe_run(device: Device, run: Run) -> dict[str, Any]:
    """Describe a run and its device as JSON values."""
    return {
        "run": str(run),
        "device": device.product(),
        "architecture": device.architecture(),
        "effective_precision": device.effective_precision(run.dtype),
        "versions": dict(device.versions()),
    }
