"""Devices by name: built-in adapters and those that other packages register.

An adapter is an entry point of the group `assay.devices`; its name is the part of a device name
before the colon. Adapters run in this process here; `assay.devices.detection.isolation` runs them
in another one, which a vendor's software may hang or crash.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from assay.devices.base import AbsentDeviceError, Detection, Device
from assay.devices.run_string import Run, parse_device
from assay.errors import AssayError, MachineError, UsageError

GROUP = "assay.devices"
_OWN_ADAPTERS = "assay.devices."

_MEMBERS = tuple(name for name in vars(Device) if not name.startswith("_"))


class UnknownDeviceError(UsageError):
    """No adapter has this name."""

    @classmethod
    def of(cls, kind: str, known: tuple[str, ...]) -> "UnknownDeviceError":
        """`known`: the names of the adapters that are installed."""
        return cls(
            f"unknown device {kind!r}; there is: {', '.join(known)}. "
            f"Others come with a package that registers an adapter (entry-point group {GROUP})"
        )


class UnsupportedDtypeError(UsageError):
    """A device that cannot run a model in the dtype of a RUN."""

    @classmethod
    def of(cls, run: Run, supported: tuple[str, ...]) -> "UnsupportedDtypeError":
        """`supported`: the dtypes of the device."""
        return cls(f"{run.device} has no {run.dtype}; it has: {', '.join(supported)}")


class BrokenAdapterError(MachineError):
    """An adapter that cannot be loaded, raises, or does not implement the protocol."""

    @classmethod
    def raised(cls, kind: str, error: BaseException) -> "BrokenAdapterError":
        """The adapter called `kind` raised `error`."""
        return cls(f"the adapter for {kind!r} is broken: {type(error).__name__}: {error}")

    @classmethod
    def lacks(cls, kind: str, names: list[str]) -> "BrokenAdapterError":
        """`names`: members of the protocol that the class lacks."""
        return cls(f"the adapter for {kind!r} is broken: it lacks {', '.join(names)}")

    @classmethod
    def ambiguous(cls, kind: str, values: list[str]) -> "BrokenAdapterError":
        """Several packages register `kind`; `values`: their entry points."""
        return cls(f"the adapter for {kind!r} is registered more than once: {', '.join(values)}")


def adapter_names() -> tuple[str, ...]:
    """The names of all adapters that are installed, broken ones included."""
    return tuple(sorted({entry_point.name for entry_point in entry_points(group=GROUP)}))


def is_own_adapter(kind: str) -> bool:
    """Whether every adapter called `kind` is part of this package."""
    return all(found.value.startswith(_OWN_ADAPTERS) for found in _registered(kind))


def is_host_adapter(kind: str) -> bool:
    """Whether `kind` is an adapter of this package for the host, which loads no driver.

    Raises: UnknownDeviceError if there is no such adapter.
    """
    return is_own_adapter(kind) and getattr(load_adapter(kind), "torch_device", None) == "cpu"


def load_adapter(kind: str) -> type[Device]:
    """The adapter class called `kind`.

    Raises: UnknownDeviceError if there is none; BrokenAdapterError if it does not load.
    """
    found = _registered(kind)
    if not found:
        raise UnknownDeviceError.of(kind, adapter_names())
    if len(found) > 1:
        raise BrokenAdapterError.ambiguous(kind, [entry_point.value for entry_point in found])
    try:
        adapter: type[Device] = found[0].load()
    except (Exception, SystemExit) as error:
        raise BrokenAdapterError.raised(kind, error) from error
    if not callable(getattr(adapter, "detect", None)):
        raise BrokenAdapterError.lacks(kind, ["detect"])
    return adapter


def detect(kind: str) -> tuple[Detection, ...]:
    """The detections of the adapter called `kind` on this machine.

    Raises: as `load_adapter`, and BrokenAdapterError if the adapter raises or returns anything
        but detections.
    """
    adapter = load_adapter(kind)
    try:
        detections: tuple[Any, ...] = tuple(adapter.detect())
    except (Exception, SystemExit) as error:
        raise BrokenAdapterError.raised(kind, error) from error
    for detection in detections:
        if not isinstance(detection, Detection):
            wrong = TypeError(f"detect() must return detections, not {detection!r}")
            raise BrokenAdapterError.raised(kind, wrong)
    if not detections:
        raise BrokenAdapterError.raised(kind, ValueError("detect() returned nothing"))
    return detections


def open_device(text: str) -> Device:
    """The device called `text`, such as "cpu", "cuda:1" or "sim:fp8".

    Raises: UsageError for a name that does not exist anywhere; MachineError for a device that
        this machine lacks or that its adapter cannot open.
    """
    name = parse_device(text)
    missing = _missing(name.kind)
    if missing:
        raise AbsentDeviceError.of(text, missing, _what_is_here())
    try:
        device = load_adapter(name.kind)(name.variant)
    except AssayError:
        raise
    except Exception as error:
        raise BrokenAdapterError.raised(name.kind, error) from error
    lacking = [member for member in _MEMBERS if not hasattr(device, member)]
    if lacking:
        raise BrokenAdapterError.lacks(name.kind, lacking)
    return device


def open_run(run: Run) -> Device:
    """Open the device of `run`, and check that it supports the run's dtype.

    Raises: as `open_device`; UnsupportedDtypeError if it lacks the dtype.
    """
    device = open_device(run.device)
    try:
        supported = tuple(device.supported_dtypes())
    except Exception as error:
        raise BrokenAdapterError.raised(parse_device(run.device).kind, error) from error
    if run.dtype not in supported:
        raise UnsupportedDtypeError.of(run, supported)
    return device


def _missing(kind: str) -> str:
    """What this machine lacks for any device called `kind`; "" if it has one."""
    detections = detect(kind)
    if any(detection.present for detection in detections):
        return ""
    return "; or ".join(detection.missing for detection in detections)


def _registered(kind: str) -> list[EntryPoint]:
    """The entry points called `kind`; one that is on the path twice counts once."""
    found = {
        entry_point.value: entry_point
        for entry_point in entry_points(group=GROUP)
        if entry_point.name == kind
    }
    return list(found.values())


def _what_is_here() -> str:
    """The host's devices: to ask for others here would import makers' software, which might hang."""
    names = [kind for kind in adapter_names() if is_own_adapter(kind) and is_host_adapter(kind)]
    return f"{', '.join(names)}, and what `assay devices` lists"


def describe_run(device: Device, run: Run) -> dict[str, Any]:
    """RUN, product, architecture, precision of products and versions, as JSON values."""
    return {
        "run": str(run),
        "device": device.product(),
        "architecture": device.architecture(),
        "effective_precision": device.effective_precision(run.dtype),
        "versions": dict(device.versions()),
    }
