"""The size of a model, and the threads and the dtype of the yardstick that follow from it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from assay.models.folders import fetch_config
from assay.models.sources import ModelSource, resolve_model
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files.reading import read_tensors

# Below this size a second thread costs more time than it saves: operations take microseconds.
SMALL_MODEL_PARAMETERS = 20_000_000

# Up to this size the yardstick is computed in float64, which takes twice the memory of float32.
# The limit is a choice; the verdict names the dtype.
FLOAT64_PARAMETERS = 2_000_000_000


def yardstick_dtype(num_parameters: int, supported: Collection[str]) -> str:
    """Return the dtype of the yardstick; `supported`: dtypes of the device."""
    small = num_parameters <= FLOAT64_PARAMETERS
    return "float64" if small and "float64" in supported else "float32"


def choose_threads(num_parameters: int) -> None:
    """Make torch use one thread for small models, and its default for others."""
    if num_parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


@contextmanager
def chosen_threads(num_parameters: int) -> Iterator[None]:
    """Apply `choose_threads` inside the context, and restore the number on exit."""
    with limited_threads(torch.get_num_threads()):
        choose_threads(num_parameters)
        yield


@contextmanager
def limited_threads(num_threads: int) -> Iterator[None]:
    """Let torch use this many threads inside the context, and restore the number on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_parameters(model: ModelSource | str) -> int:
    """Count the parameters by the headers of the files of `model`, otherwise by its configuration."""
    source = resolve_model(model) if isinstance(model, str) else model
    folder = source.recipe.folder if source.recipe and source.trained else source.folder
    tensors = read_tensors(folder) if folder is not None else None
    if tensors is not None:
        return sum(tensor.num_elements for tensor in tensors)
    return _count_on_meta(source)


def _count_on_meta(source: ModelSource) -> int:
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
