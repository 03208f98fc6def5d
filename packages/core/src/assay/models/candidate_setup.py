"""Apply `--candidate-setup FILE.py:FUNC` to a loaded model."""

from torch import nn

from assay.errors import UsageError, raised_in_words
from assay.plugins import load_object

# Setup functions that were called in this process.
called: set[str] = set()


def set_up(model: nn.Module, reference: str | None) -> nn.Module:
    """Return the model after the user's setup function, which may change or replace it.

    reference: FILE.py:FUNC, called before LoRA, wrapping and optimizer; None for no function.
    Raises: UsageError if the function cannot be loaded, raises, or returns anything but a module or None.
    """
    if reference is None:
        return model
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
