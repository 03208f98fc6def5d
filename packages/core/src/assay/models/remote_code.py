"""Permission to run code that comes with a model."""

from typing import Literal

RemoteCode = Literal["refuse", "trust"]


def remote_code_of(*, trusted: bool) -> RemoteCode:
    """Convert the option --trust-remote-code."""
    return "trust" if trusted else "refuse"


def transformers_option(remote_code: RemoteCode) -> dict[str, bool]:
    """Return the argument for `from_pretrained` of every Auto class."""
    return {"trust_remote_code": remote_code == "trust"}
