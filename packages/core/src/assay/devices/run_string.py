"""RUN strings: `DEVICE/DTYPE`, and device names."""

import re
from dataclasses import dataclass

from assay.errors import UsageError

# Formats that parameters can be stored in; tf32 and fp8 are formats of operands only.
RUN_DTYPES = ("float64", "float32", "bfloat16", "float16")

_DEVICE = re.compile(r"(?P<kind>[a-z][a-z0-9_]*)(?::(?P<variant>[a-z0-9_]+))?")


class RunStringError(UsageError):
    """A text that is not a RUN or a device name."""

    @classmethod
    def device(cls, text: str) -> "RunStringError":
        """`text` has not the form of a device name."""
        return cls(f"{text!r} is no device; write one as cpu, cuda:1 or sim:fp8")

    @classmethod
    def run(cls, text: str) -> "RunStringError":
        """`text` has not the form DEVICE/DTYPE."""
        return cls(f"{text!r} is no run; write one as DEVICE/DTYPE, such as cuda:1/bfloat16")

    @classmethod
    def dtype(cls, text: str, dtype: str) -> "RunStringError":
        """`dtype` is not in `RUN_DTYPES`."""
        return cls(f"unknown dtype {dtype!r} in run {text!r}; known: {', '.join(RUN_DTYPES)}")


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The two parts of a device name: the entry point's name and the part after the colon.

    >>> str(DeviceName("sim", "fp8"))
    'sim:fp8'
    """

    kind: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.variant}" if self.variant else self.kind


@dataclass(frozen=True, slots=True)
class Run:
    """Where a model runs and in which dtype.

    >>> str(Run("cuda:1", "bfloat16"))
    'cuda:1/bfloat16'
    """

    device: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.device}/{self.dtype}"


def parse_device(text: str) -> DeviceName:
    """The parts of a device name; the registry checks that there is such a device.

    >>> parse_device("cuda:1")
    DeviceName(kind='cuda', variant='1')

    Raises: RunStringError if `text` is not of the form KIND or KIND:VARIANT.
    """
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise RunStringError.device(text)
    return DeviceName(match["kind"], match["variant"] or "")


def parse_run(text: str) -> Run:
    """The parts of a RUN.

    >>> parse_run("sim:fp8/bfloat16")
    Run(device='sim:fp8', dtype='bfloat16')

    Raises: RunStringError if `text` is not DEVICE/DTYPE or names no dtype of `RUN_DTYPES`.
    """
    device, slash, dtype = text.partition("/")
    if not slash or not device or not dtype:
        raise RunStringError.run(text)
    parse_device(device)
    if dtype not in RUN_DTYPES:
        raise RunStringError.dtype(text, dtype)
    return Run(device, dtype)
