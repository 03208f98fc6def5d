"""Parse RUN strings (`DEVICE/DTYPE`) and device names."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from assay.errors import UsageError

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
