"""`--candidate-option NAME=VALUE`: settings of the candidate's run."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from assay.counts import parse_count
from assay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.devices.base import Device
    from assay.models import LoadedModel


@dataclass(frozen=True, slots=True)
class CandidateOptions:
    """Options by name. None leaves the choice to the libraries."""

    threads: int | None = None
    attention: str | None = None
    experts: str | None = None
    batch_size: int | None = None
    """1: each prompt runs alone, with the padding that it has in its batch."""
    compile: bool = False

    @classmethod
    def parse(cls, options: dict[str, str]) -> Self:
        """Parse NAME=VALUE pairs. Raises: UsageError for an unknown name or value."""
        known: dict[str, Callable[[str], dict[str, Any]]] = {
            "threads": lambda text: {"threads": parse_count("candidate option threads", text)},
            "attention": lambda text: {"attention": text},
            "experts": lambda text: {"experts": text},
            "batch-size": lambda text: {"batch_size": _one(text)},
            "compile": lambda text: {"compile": _truth(text)},
            "padding": _left,
        }
        values: dict[str, Any] = {}
        for name, text in options.items():
            if name not in known:
                raise UsageError(
                    f"unknown candidate option {name!r}; there are: {', '.join(sorted(known))}"
                )
            try:
                values |= known[name](text)
            except ValueError as error:
                raise UsageError(f"candidate option {name}={text}: {error}") from None
        return cls(**values)

    def apply_to_process(self) -> None:
        """Set the options that affect the whole process."""
        import torch  # slow; parsing options must not need it

        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def compiled(self, loaded: "LoadedModel", device: "Device") -> "LoadedModel":
        """Compile the model if the options say so."""
        import torch  # as above

        if not self.compile:
            return loaded
        loaded.model.forward = torch.compile(
            loaded.model.forward, backend=device.vendor.compile_backend, dynamic=True
        )
        return replace(loaded)


def _one(text: str) -> int:
    if text != "1":
        raise ValueError("only 1 is possible: each prompt alone")
    return 1


def _truth(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _left(text: str) -> dict[str, object]:
    if text != "left":
        raise ValueError("batches are padded on the left, as generation needs it")
    return {}
