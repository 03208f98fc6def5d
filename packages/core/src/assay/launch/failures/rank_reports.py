"""The report of a rank on its body, and how it is made."""

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

# Parts of gloo's messages that are not about what happened: a line of its source, advice.
_COMMUNICATION_NOISE = (
    re.compile(r"\[[^\]]*/gloo/[^\]]*\] "),
    re.compile(r"\.? This is typically caused by .*"),
)

_OWN_FOLDER = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class RankReport:
    """How the body of one rank ended.

    summary: exception and message in one line, or why it skipped.
    where: the line of the body's own code that raised.
    is_communication: whether the exception means only that another rank did not answer.
    words: the message of an AssayError; "" for all other exceptions.
    is_usage: whether the exception is a UsageError.
    value: the pickled return value of the body.
    """

    kind: Kind
    summary: str = ""
    where: str = ""
    traceback: str = ""
    is_communication: bool = False
    words: str = ""
    is_usage: bool = False
    value: bytes = b""


def report_of(body: Callable[[], object]) -> RankReport:
    """Run `body`, and report its return value or its exception, SystemExit and Ctrl-C included."""
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
    """The report of an exception that left the body."""
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
    """`trace` without its outermost frames, which are those that call the body on every rank."""
    while trace is not None and trace.tb_next is not None:
        frame = trace.tb_frame
        if not (
            frame.f_code.co_filename.startswith(_OWN_FOLDER)
            or frame.f_locals.get("__tracebackhide__")
        ):
            break
        trace = trace.tb_next
    return trace
