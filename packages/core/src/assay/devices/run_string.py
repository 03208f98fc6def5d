"""Parse RUN strings (`DEVICE/DTYPE`) and device names, and know other names of vendors."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from assay.errors import UsageError

# Names that people write in labels of pull requests and in options.
_ALSO_CALLED = {
    "nvidia": ("cuda", "gpu", "h100", "h200", "a100"),
    "amd": ("rocm", "hip", "mi300", "mi300x"),
    "intel": ("xpu",),
    "gaudi": ("hpu", "habana"),
    "spyre": ("aiu", "ibm"),
    "trainium": ("neuron", "trn", "aws"),
    "ascend": ("npu", "huawei"),
    "apple": ("mps", "mac"),
}
# The names of their devices in torch.
_DEVICES = {
    "nvidia": "cuda",
    "amd": "cuda",
    "intel": "xpu",
    "gaudi": "hpu",
    "spyre": "spyre",
    "trainium": "xla",
    "ascend": "npu",
    "apple": "mps",
}
_VENDORS = {other: vendor for vendor, others in _ALSO_CALLED.items() for other in others}


def find_vendor_name(name: str) -> str:
    """Return the vendor that is also called `name`; otherwise `name`."""
    return _VENDORS.get(name, name)


def suggest_device(name: str) -> str:
    """Say which device to write instead of another name of its vendor; "" if no vendor has the name."""
    vendor = find_vendor_name(name)
    device = _DEVICES.get(vendor)
    return f"write {device}, the name in torch for devices of {vendor}" if device else ""


# Formats of stored parameters. tf32 and fp8 are formats of operands only.
RUN_DTYPES = ("float64", "float32", "bfloat16", "float16")

_DEVICE = re.compile(r"(?P<kind>[a-z][a-z0-9_]*)(?::(?P<variant>[a-z0-9_]+))?")


class DeviceName(NamedTuple):
    """A device name: the name of the adapter and the part after the colon."""

    kind: str
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A device and the dtype in which a model runs on it.

    >>> str(Run("cuda:1", "bfloat16"))
    'cuda:1/bfloat16'
    """

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device}/{self.dtype}"


def parse_device(text: str) -> DeviceName:
    """Split a device name. The registry checks that the device exists.

    >>> parse_device("cuda:1")
    DeviceName(kind='cuda', variant='1')

    Raises: UsageError if `text` is not KIND or KIND:VARIANT.
    """
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a device; write one as cpu, cuda:1 or sim:fp8")
    return DeviceName(match["kind"], match["variant"] or "")


def parse_run(text: str) -> Run:
    """Split a RUN.

    >>> parse_run("sim:fp8/bfloat16")
    Run(device='sim:fp8', dtype='bfloat16')

    Raises: UsageError if `text` is not DEVICE/DTYPE or names no dtype of `RUN_DTYPES`.
    """
    device, slash, dtype = text.partition("/")
    if not slash or not device or not dtype:
        raise UsageError(
            f"{text!r} is not a run; write one as DEVICE/DTYPE, such as cuda:1/bfloat16"
        )
    parse_device(device)
    if dtype not in RUN_DTYPES:
        raise UsageError(f"unknown dtype {dtype!r} in run {text!r}; known: {', '.join(RUN_DTYPES)}")
    return Run(device, dtype)
