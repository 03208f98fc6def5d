"""Find the size of a model without loading its weights."""

from dataclasses import dataclass
from typing import Any

from assay.models.folders import fetch_config
from assay.models.sources import ModelSource, resolve_model
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files.reading import read_tensors


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model."""

    num_parameters: int


def estimate_size(model: ModelSource | str) -> ModelSize:
    """Read the size of `model` from the headers of its files, otherwise from its configuration."""
    source = resolve_model(model) if isinstance(model, str) else model
    folder = source.recipe.folder if source.recipe and source.trained else source.folder
    tensors = read_tensors(folder) if folder is not None else None
    if tensors is not None:
        return ModelSize(sum(tensor.num_elements for tensor in tensors))
    return ModelSize(_count_on_meta(source))


def _count_on_meta(source: ModelSource) -> int:
    import torch
    import transformers

    from assay.models.loading.configs import load_config
    from assay.models.micro.untrained import new_config

    with quiet_transformers(), torch.device("meta"):
        if source.recipe is not None:
            config = new_config(source.recipe)
        else:
            config = load_config(source.folder or fetch_config(source.reference), "refuse")
        name = (config.architectures or [""])[0]
        model_class: Any = getattr(transformers, name, transformers.AutoModel.from_config)
        model: torch.nn.Module = model_class(config)
    return sum(value.numel() for value in model.parameters())
