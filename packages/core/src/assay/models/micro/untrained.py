"""Make untrained micro models."""

from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from assay.models.micro.recipes import MicroRecipe
from assay.models.saving import save_pretrained
from assay.models.transformers_logging import quiet_transformers


def new_config(recipe: MicroRecipe) -> PretrainedConfig:
    """Make the Hugging Face configuration of `recipe`."""
    config: PretrainedConfig = AutoConfig.for_model(recipe.model_type, **recipe.settings)
    config.architectures = [recipe.architecture]
    return config


def new_model(recipe: MicroRecipe, seed: int) -> PreTrainedModel:
    """Make a randomly initialized float32 model without changing the global random state."""
    import transformers

    model_class = getattr(transformers, recipe.architecture)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(new_config(recipe)).float()
    return model


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write `model` as a Hugging Face folder with bfloat16 weights. Its dtype in memory stays."""
    state = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.config.dtype = torch.bfloat16
    save_pretrained(model, folder, state)
