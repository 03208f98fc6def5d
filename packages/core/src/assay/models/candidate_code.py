"""The candidate's setup function: models and functions of this process become one, and it is applied.

They are written to a file, which the candidate's process imports as a setup function.
"""

# ruff: noqa: ANN401 - the user's objects

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError, raised_in_words
from assay.plugins import load_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

# Setup functions that were called in this process.
called: set[str] = set()

_STUB = '''"""Written by assay for the Python argument {option}."""

from assay.models.candidate_code import {reader}

{name} = {reader}(__file__)
'''


def make_not_importable_error(option: str, why: str) -> UsageError:
    """Make the error; `why` is a clause."""
    return UsageError(
        f"{option}: {why}. The candidate runs in another process: put the code into a"
        " file, and import it from there or give FILE.py:FUNC as candidate_setup"
    )


@dataclass(frozen=True, slots=True)
class CandidateCode:
    """Code that changes or replaces the candidate's model."""

    given: Any
    """FILE.py:FUNC, an object that can be pickled, or None."""
    option: str
    """The parameter that the user passed."""
    dtype: str

    def write(self, folder: Path) -> str | None:
        """Return FILE.py:FUNC, after writing an object into `folder`."""
        if self.given is None or isinstance(self.given, str):
            return self.given
        import torch  # not needed on the command line

        file = folder / f"{self.option}.py"
        torch.save((self.given, self.dtype), file.with_suffix(".pt"))
        name = getattr(self.given, "__name__", type(self.given).__name__)
        reader = "read_model" if self.option == "candidate_model" else "read_setup"
        file.write_text(_STUB.format(option=self.option, reader=reader, name=name), "utf-8")
        return f"{file}:{name}"


def candidate_code(
    setup: "str | Callable[[nn.Module], nn.Module | None] | None",
    model: "nn.Module | Callable[[], nn.Module] | None",
    run: str,
) -> CandidateCode:
    """Wrap the setup or the model, of which at most one is given, for a candidate on `run`.

    Raises: UsageError if both are given; UsageError for an object that cannot be pickled.
    """
    if setup is not None and model is not None:
        raise UsageError("give either candidate_setup or candidate_model")
    option = "candidate_setup" if model is None else "candidate_model"
    given = setup if model is None else model
    if given is not None and not isinstance(given, str):
        _require_importable(option, given)
    return CandidateCode(given, option, run.rpartition("/")[2])


def read_setup(file: str) -> "Callable[[nn.Module], nn.Module | None]":
    """Read the setup function stored next to `file`."""
    setup: Callable[[nn.Module], nn.Module | None] = _read(file)[0]
    return setup


def read_model(file: str) -> "Callable[[nn.Module], nn.Module]":
    """Make a setup function that replaces the loaded model by the one stored next to `file`."""

    def replace(loaded: "nn.Module") -> "nn.Module":
        from torch import nn

        given, dtype = _read(file)
        model: nn.Module = given if isinstance(given, nn.Module) else given()
        return _match_device_and_dtype(loaded, model, dtype)

    return replace


def _read(file: str) -> Any:
    import torch

    # Unpickling is safe: this run wrote the file.
    return torch.load(Path(file).with_suffix(".pt"), map_location="cpu", weights_only=False)


def _match_device_and_dtype(loaded: "nn.Module", model: "nn.Module", dtype: str) -> "nn.Module":
    """Move `model` to the device of `loaded`, and cast each tensor to its dtype there.

    dtype: the candidate's. In a model that runs in float64, parameters are first rounded to it.
    """
    import torch

    wanted = dict(_tensors(loaded))
    model.to(next(loaded.parameters()).device)
    for name, tensor in _tensors(model):
        if name in wanted and tensor.is_floating_point():
            if isinstance(tensor, torch.nn.Parameter) and wanted[name].dtype == torch.float64:
                tensor.data = tensor.data.to(getattr(torch, dtype))
            tensor.data = tensor.data.to(wanted[name].dtype)
    return model.train(loaded.training)


def _tensors(model: "nn.Module") -> "Iterator[tuple[str, Tensor]]":
    yield from model.named_parameters()
    yield from model.named_buffers()


class _ImportCheck(pickle.Pickler):
    """Pickler that refuses functions and classes of this process alone, and skips tensors."""

    def __init__(self, option: str) -> None:
        super().__init__(io.BytesIO())
        self._option = option

    def persistent_id(self, value: object) -> str | None:
        import torch

        return "tensor" if isinstance(value, torch.Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        name = getattr(value, "__qualname__", "")
        if callable(value) and name and getattr(value, "__module__", None) == "__main__":
            why = f"{name} is defined in this script or notebook, which is not imported again"
            raise make_not_importable_error(self._option, why)
        return NotImplemented


def _require_importable(option: str, given: object) -> None:
    if not callable(given):
        raise UsageError(f"{option}: {type(given).__name__} is neither a model nor a function")
    try:
        _ImportCheck(option).dump(given)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise make_not_importable_error(option, str(error)) from None


def set_up(model: "nn.Module", reference: str | None) -> "nn.Module":
    """Return the model after the user's setup function, which may change or replace it.

    reference: FILE.py:FUNC, called before LoRA, wrapping and optimizer; None for no function.
    Raises: UsageError if the function cannot be loaded, raises, or returns anything but a module or None.
    """
    if reference is None:
        return model
    from torch import nn

    function = load_object(reference)
    called.add(reference)
    try:
        result = function(model)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{reference} raised {raised_in_words(error)}") from error
    if result is None:
        return model
    if not isinstance(result, nn.Module):
        raise UsageError(
            f"{reference} returned {type(result).__name__}; it must return a module, or nothing"
        )
    return result
