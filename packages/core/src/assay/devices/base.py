"""The protocol of devices. A vendor's adapter is one class that implements it.

This file imports neither torch nor a vendor's module.
"""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from assay.errors import MachineError, UsageError


@dataclass(frozen=True, slots=True)
class DeviceVendor:
    """Constants of a vendor's devices."""

    name: str
    title: str
    distributed_backend: str
    """Name for `torch.distributed.init_process_group`."""
    compile_backend: str
    """Name for `torch.compile(backend=...)`."""
    runner_labels: tuple[str, ...]
    """Labels of the CI runners with such a device."""
    visible_devices: str = ""
    """Environment variable that lists the device numbers a process may use; "" if none exists."""
    training_compile_backend: str | None = None
    """Compile backend for training, if it is not `compile_backend`."""
    verified: str = ""
    """Hardware on which the adapter has run; "" if only on a stand-in of the vendor's module."""
    measures_memory: bool = True
    """False if the vendor's software reports no peak or no free memory, which are then 0."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The devices of one vendor on this machine."""

    vendor: DeviceVendor
    products: tuple[str, ...] = ()
    """Product name of each device, in the order of the indices."""
    missing: str = ""
    """Requirement that this machine lacks, such as a driver; "" if it has a usable device."""
    variants: tuple[str, ...] = ()
    """Parts that may follow the colon in a device name, such as "1" or "fp8"."""

    def __post_init__(self) -> None:
        if bool(self.products) == bool(self.missing):
            raise ValueError(
                f"a detection of {self.vendor.name} must name either devices or what is missing, "
                f"not {self.products!r} and {self.missing!r}"
            )

    @property
    def present(self) -> bool:
        """Return True if at least one device was found."""
        return not self.missing


@runtime_checkable
class Device(Protocol):
    """One opened device; an entry point of the group `assay.devices` names its class.

    The constructor takes the part of the device name after the colon, an index or the name of a
    mode, or "". It raises MachineError for an index that this machine lacks and UsageError for any
    other unknown variant.
    """

    def __init__(self, variant: str = "") -> None: ...

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Look for devices; return one entry per vendor of the adapter.

        May import vendor modules and initialize drivers. `assay.devices.detection` calls
        it in another process under a timeout.
        """

    @property
    def name(self) -> str:
        """Return the device part of a RUN, such as "cuda:1" or "sim:fp8"."""

    @property
    def vendor(self) -> DeviceVendor:
        """Return the constants of the vendor."""

    @property
    def torch_device(self) -> str:
        """Return the argument for `torch.device`, such as "cuda:1"; "cpu" for the simulated device."""

    def count(self) -> int:
        """Count the devices of this kind that this process can use."""

    def product(self) -> str:
        """Return the product name, such as "NVIDIA H200"."""

    def architecture(self) -> str:
        """Return the architecture that kernels are built for, such as "sm_90"; a key of expectations."""

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes that a model can run in, by their names in `assay.dtypes.FORMATS`."""

    def effective_precision(self, dtype: str) -> str:
        """Return the format to which operands of matrix products in `dtype` are rounded.

        It depends on the current settings: `dtype`, or a format such as "tf32" or "hf32".
        """

    def seed(self, seed: int) -> None:
        """Seed every generator that a run on this device draws from."""

    def deterministic(self) -> AbstractContextManager[None]:
        """Use deterministic kernels inside the context where they exist; restore settings on exit."""

    def execution(self) -> AbstractContextManager[None]:
        """Run model code on this device inside the context. Only simulated devices change arithmetic."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done."""

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the memory peak."""

    def peak_memory_bytes(self) -> int:
        """Return the peak of memory in use since the last reset; 0 if unknown."""

    def free_memory_bytes(self) -> int:
        """Return the memory that can be allocated now; 0 if unknown."""

    def versions(self) -> Mapping[str, str]:
        """Return versions of software that affects numbers: torch, driver, runtime, libraries."""


def make_absent_error(name: str, missing: str, available: str) -> MachineError:
    """Make the error for a known device from what this machine lacks and the devices that it has."""
    return MachineError(
        f"device {name!r} is absent; missing: {missing}. On this machine: {available}"
    )


def make_variant_error(kind: str, variant: str, known: tuple[str, ...]) -> UsageError:
    """Make the error for an unknown index or mode of a known kind of device."""
    names = ", ".join((kind, *(f"{kind}:{name}" for name in known)))
    return UsageError(f"unknown device '{kind}:{variant}'; there is: {names}")


class _Thread(threading.local):
    is_suspended = False


_thread = _Thread()


def execution_suspended() -> bool:
    """Return True inside `SuspendedExecution` in this thread."""
    return _thread.is_suspended


class SuspendedExecution:
    """A context in which this thread computes as the host does, even within `Device.execution`.

    For hooks that measure a forward pass, whose arithmetic a simulated device would round too.
    """

    def __enter__(self) -> None:
        self._outer, _thread.is_suspended = _thread.is_suspended, True

    def __exit__(self, *_: object) -> None:
        _thread.is_suspended = self._outer
