"""`--candidate-setup FILE.py:FUNC`: changes the model before LoRA, wrapping and optimizer."""

from torch import nn

from assay.errors import UsageError
from assay.plugins import load_object

# References of the functions that were called in this process.
called: set[str] = set()


class SetupError(UsageError):
    """A setup function that failed, or was never called."""

    @classmethod
    def not_called(cls, reference: str, trainer: str) -> "SetupError":
        """The trainer builds its model without it."""
        return cls(
            f"{trainer} never called {reference}: its build_model has to call"
            " assay.training.setups.set_up(model, plan.setup), or that of ReferenceTrainer"
        )


def set_up(model: nn.Module, reference: str | None) -> nn.Module:
    """The model after the user's setup function, which may change it or return another.

    Raises: PluginError, SetupError.
    """
    if reference is None:
        return model
    function = load_object(reference)
    called.add(reference)
    try:
        result = function(model)
    except (Exception, SystemExit) as error:
        raise SetupError(f"{reference} raised {type(error).__name__}: {error}") from error
    if result is None:
        return model
    if not isinstance(result, nn.Module):
        raise SetupError(
            f"{reference} returned {type(result).__name__}; it must return a module, or nothing"
        )
    return result
