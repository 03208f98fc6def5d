"""The protocol of devices. A vendor's adapter is one class that implements it.

Importing this file is cheap: it imports neither torch nor a vendor's module.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from assay.errors import MachineError, UsageError


@dataclass(frozen=True, slots=True)
class Vendor:
    """Constants of a maker's devices, whether or not one is present.

    distributed_backend: name for `torch.distributed.init_process_group`.
    compile_backend: name for `torch.compile(backend=...)`.
    runner_labels: labels of the CI runners that carry such a device.
    visible_devices: the environment variable that lists by number the devices that a process is
        given; "" if there is none.
    training_compile_backend: the backend for training, where it is another than `compile_backend`.
    verified: what the adapter was run on; "" if on no hardware yet, only on a stand-in of the maker's
        module.
    measures_memory: whether its software tells the peak of the memory and what is free; where it
        does not, what it does not tell is 0.
    """

    name: str
    title: str
    distributed_backend: str
    compile_backend: str
    runner_labels: tuple[str, ...]
    visible_devices: str = ""
    training_compile_backend: str | None = None
    verified: str = ""
    measures_memory: bool = True


@dataclass(frozen=True, slots=True)
class Detection:
    """The result of looking for a vendor's devices on this machine.

    products: the product name of each device found, in the order of their indices.
    missing: what is missing before one can be used; "" if there is at least one.
    variants: parts that may follow the colon in a device name, such as "1" or "fp8".
    """

    vendor: Vendor
    products: tuple[str, ...] = ()
    missing: str = ""
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.products) == bool(self.missing):
            raise ValueError(
                f"a detection of {self.vendor.name} must name either devices or what is missing, "
                f"not {self.products!r} and {self.missing!r}"
            )

    @property
    def present(self) -> bool:
        """Whether at least one device was found."""
        return not self.missing

    @property
    def count(self) -> int:
        """Number of devices found."""
        return len(self.products)


@runtime_checkable
class Device(Protocol):
    """One opened device; an entry point of `assay.devices` names its class.

    The constructor takes the variant, the part of the name after the colon ("" if there is
    none): an index or the name of a mode. It raises `AbsentDeviceError` for an index that this
    machine lacks and `UnknownVariantError` for any other unknown variant.
    """

    def __init__(self, variant: str = "") -> None: ...

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """What this machine has, one entry for each vendor that the adapter serves.

        May import vendor modules and initialise drivers; `assay.devices.detection.isolation` calls
        it in another process under a timeout.
        """
        ...

    @property
    def name(self) -> str:
        """The device part of a RUN, such as "cuda:1" or "sim:fp8"."""
        ...

    @property
    def vendor(self) -> Vendor:
        """The constants of its maker."""
        ...

    @property
    def torch_device(self) -> str:
        """The argument for `torch.device`, such as "cuda:1"; "cpu" for the simulated device."""
        ...

    def count(self) -> int:
        """Number of devices of this kind that this process can use."""
        ...

    def product(self) -> str:
        """Name of the product, such as "NVIDIA H200"."""
        ...

    def architecture(self) -> str:
        """The target that its kernels are built for, such as "sm_90"; a key of expectations."""
        ...

    def supported_dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that a model can run in, as in `assay.dtypes.FORMATS`."""
        ...

    def effective_precision(self, dtype: str) -> str:
        """The format to which operands of matrix products in `dtype` are rounded.

        Returns: `dtype`, or another format under the present settings ("tf32", "hf32").
        """
        ...

    def seed(self, seed: int) -> None:
        """Seed every generator that a run on this device draws from."""
        ...

    def deterministic(self) -> AbstractContextManager[None]:
        """Inside, operations with a deterministic kernel use it; settings are restored."""
        ...

    def execution(self) -> AbstractContextManager[None]:
        """Inside, model code runs on this device; only simulated devices change its arithmetic."""
        ...

    def synchronize(self) -> None:
        """Wait until all submitted work has been computed."""
        ...

    def reset_peak_memory(self) -> None:
        """Start a new measurement of the memory peak."""
        ...

    def peak_memory_bytes(self) -> int:
        """Most memory in use at one time since the last reset; 0 where its maker tells none."""
        ...

    def free_memory_bytes(self) -> int:
        """Memory that can be allocated now; 0 where its maker tells none."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Versions of the software that numbers depend on: torch, driver, runtime, libraries."""
        ...


class AbsentDeviceError(MachineError):
    """A known device that this machine does not have."""

    @classmethod
    def of(cls, name: str, missing: str, available: str) -> "AbsentDeviceError":
        """`missing`: what this machine lacks; `available`: names of devices that it has."""
        return cls(f"device {name!r} is absent; missing: {missing}. This machine has: {available}")


class UnknownVariantError(UsageError):
    """An unknown index or mode of a known kind of device."""

    @classmethod
    def of(cls, kind: str, variant: str, known: tuple[str, ...]) -> "UnknownVariantError":
        """`known`: the existing variants."""
        names = ", ".join((kind, *(f"{kind}:{name}" for name in known)))
        return cls(f"unknown device '{kind}:{variant}'; there is: {names}")


_thread = threading.local()


def execution_suspended() -> bool:
    """Whether this thread is inside of `suspend_execution`."""
    return getattr(_thread, "suspended", False)


@contextmanager
def suspend_execution() -> Iterator[None]:
    """Inside, this thread computes as the host does, also within `Device.execution`.

    For hooks that measure a forward pass: a simulated device would round their arithmetic too.
    """
    outer = execution_suspended()
    _thread.suspended = True
    try:
        yield
    finally:
        _thread.suspended = outer
