"""Find the size of a model without loading its weights."""

from dataclasses import dataclass
from typing import Any, cast

from assay.models.folders import fetch_config
from assay.models.sources import ModelSource, resolve_model
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files.reading import read_tensors, weight_files


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model and of its weight files."""

    num_parameters: int
    checkpoint_bytes: int


def estimate_size(model: ModelSource | str) -> ModelSize:
    """Read the size of `model` from the headers of its files, otherwise from its configuration."""
    source = resolve_model(model) if isinstance(model, str) else model
    folder = source.recipe.folder if source.recipe and source.trained else source.folder
    if folder is not None:
        tensors = read_tensors(folder)
        if tensors is not None:
            return ModelSize(
                sum(tensor.num_elements for tensor in tensors),
                sum(tensor.size_bytes for tensor in tensors),
            )
    num_parameters, element_bytes = _count_on_meta(source)
    if folder is not None:
        return ModelSize(num_parameters, sum(file.stat().st_size for file in weight_files(folder)))
    return ModelSize(num_parameters, num_parameters * element_bytes)


def _count_on_meta(source: ModelSource) -> tuple[int, int]:
    import torch
    import transformers

    from assay.models.loading.configs import load_config
    from assay.models.micro.untrained import new_config

    with quiet_transformers():
        if source.recipe is not None:
            config = new_config(source.recipe)
            config.dtype = torch.bfloat16
        else:
            config = load_config(source.folder or fetch_config(source.reference), "refuse")
        with torch.device("meta"):
            name = (config.architectures or [""])[0]
            model_class: Any = getattr(transformers, name, transformers.AutoModel.from_config)
            model: torch.nn.Module = model_class(config)
    dtype = cast("torch.dtype | None", config.dtype) or torch.float32
    return sum(value.numel() for value in model.parameters()), dtype.itemsize
