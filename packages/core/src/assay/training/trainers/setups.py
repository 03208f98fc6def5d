"""`--candidate-setup FILE.py:FUNC`: changes the model before LoRA, wrapping and optimizer."""

from torch import nn

from assay.models.candidate_setup import apply_setup
from assay.plugins import load_object

# Setup functions that were called in this process.
called: set[str] = set()


def set_up(model: nn.Module, reference: str | None) -> nn.Module:
    """Return the model after the user's setup function, which may change or replace it.

    Raises: UsageError.
    """
    if reference is None:
        return model
    function = load_object(reference)
    called.add(reference)
    return apply_setup(function, model, reference)
