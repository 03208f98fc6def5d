"""The report of a rank on the end of its body."""

import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from assay.errors import AssayError, UsageError
from assay.launch.errors import RankSkipped, UnsendableError
from assay.launch.failures.stacks import Frame, describe_place

Kind = Literal["returned", "skipped", "raised"]

# Parts of gloo's messages that do not describe the event: a source line, advice.
_COMMUNICATION_NOISE = (
    re.compile(r"\[[^\]]*/gloo/[^\]]*\] "),
    re.compile(r"\.? This is typically caused by .*"),
)

_OWN_FOLDER = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class RankReport:
    """The end of the body of one rank."""

    kind: Kind
    summary: str = ""
    """Exception and message in one line, or the reason of a skip."""
    where: str = ""
    """The line of the body's own code that raised."""
    traceback: str = ""
    is_communication: bool = False
    """True if the exception means only that another rank did not answer."""
    words: str = ""
    """The message of an AssayError; "" for all other exceptions."""
    is_usage: bool = False
    """True if the exception is a UsageError."""
    value: bytes = b""
    """The pickled return value of the body."""


def report_of(body: Callable[[], object]) -> RankReport:
    """Run `body`. Report its return value or exception, including SystemExit and Ctrl-C."""
    try:
        value = body()
        try:
            return RankReport("returned", value=pickle.dumps(value))
        except Exception as error:  # noqa: BLE001 - pickle raises what the value's class does
            raise UnsendableError.of("what the body returned", value, error) from None
    except RankSkipped as skipped:
        return RankReport("skipped", summary=str(skipped))
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        return raised_report(error)


def raised_report(error: BaseException) -> RankReport:
    """Report an exception of the body."""
    from assay.launch.joining import is_communication_error

    error = error.with_traceback(_trimmed(error.__traceback__))
    return RankReport(
        "raised",
        summary=_summary(error),
        where=_place(error),
        traceback="".join(traceback.format_exception(error)).rstrip(),
        is_communication=is_communication_error(error),
        words=str(error) if isinstance(error, AssayError) else "",
        is_usage=isinstance(error, UsageError),
    )


def _summary(error: BaseException) -> str:
    text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    for noise in _COMMUNICATION_NOISE:
        text = noise.sub("", text)
    return text


def _place(error: BaseException) -> str:
    stack = traceback.extract_tb(error.__traceback__)
    return describe_place([Frame(f.filename, str(f.lineno), f.name) for f in reversed(stack)])


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Remove the outermost frames, which call the body on every rank."""
    while trace is not None and trace.tb_next is not None:
        frame = trace.tb_frame
        if not (
            frame.f_code.co_filename.startswith(_OWN_FOLDER)
            or frame.f_locals.get("__tracebackhide__")
        ):
            break
        trace = trace.tb_next
    return trace
