"""Apply `--candidate-setup FILE.py:FUNC` to a loaded model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from assay.errors import UsageError, raised_in_words


def make_setup_error(reference: str, trainer: str) -> UsageError:
    """Make the error for a trainer that built its model without calling the setup function."""
    return UsageError(
        f"{trainer} never called {reference}: its setup has to call"
        " assay.training.set_up(model, plan.setup), as build_model of ReferenceTrainer does"
    )


def apply_setup(function: Callable[[nn.Module], Any], model: nn.Module, name: str) -> nn.Module:
    """Call the setup `function`; return `model`, or the module that the function returned.

    name: the function's name for messages.
    Raises: UsageError if the function raises or returns anything but a module or None.
    """
    try:
        result = function(model)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name} raised {raised_in_words(error)}") from error
    if result is None:
        return model
    if not isinstance(result, nn.Module):
        raise UsageError(
            f"{name} returned {type(result).__name__}; it must return a module, or nothing"
        )
    return result
