"""Read weights by name: each rank reads only the tensors of its own modules from a folder.

The whole model is built on the meta device, which costs no memory; modules of other ranks are removed
and the rest is filled. Every rank checks names and shapes of all tensors before it reads a value, so
that all ranks fail together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from assay.errors import UsageError, name_some
from assay.models.folders import local_folder
from assay.models.loaded.tensor_sources import TensorSource, find_sources
from assay.models.loading.configs import find_model_class, load_config
from assay.models.loading.loaded_model import DTYPES
from assay.models.remote_code import RemoteCode
from assay.models.sources import resolve_model
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files.mapping import map_folder
from assay.models.weight_files.reading import read_tensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def name_difference(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Name the missing and the extra tensors of a file."""
    kinds = (("missing", sorted(missing)), ("extra", sorted(extra)))
    return "; ".join(f"{kind}: {name_some(names)}" for kind, names in kinds if names)


def make_weights_error(folder: Path, missing: Iterable[str], extra: Iterable[str]) -> UsageError:
    """Make the error for names that the folder (`missing`) or the model (`extra`) lacks."""
    names = name_difference(missing, extra)
    return UsageError(f"{folder} does not hold the tensors of its model; {names}")


def make_shape_error(
    folder: Path, name: str, stored: Sequence[int], needed: Sequence[int]
) -> UsageError:
    """Make the error for a stored tensor of another shape than the model's."""
    return UsageError(f"{folder}: {name} has the shape {[*stored]}, the model needs {[*needed]}")


def _make_unfilled_error(name: str, why: str) -> UsageError:
    """Make the error for a tensor whose values can neither be read nor computed."""
    return UsageError(f"{name} cannot be filled: {why}")


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of one model in a folder, read on demand; made by `open_weights`."""

    folder: Path
    config: "PretrainedConfig"
    model_class: type[Any]
    dtype: torch.dtype
    sources: dict[str, TensorSource] = field(default_factory=dict)
    """The stored tensors of each parameter or buffer."""

    def empty_model(self, attention: str | None = None) -> nn.Module:
        """Build the whole model on the meta device, in evaluation mode.

        attention: name of an implementation of transformers; None for its default.
        """
        implementation = {} if attention is None else {"attn_implementation": attention}
        build = getattr(self.model_class, "_from_config", None) or self.model_class.from_config
        with torch.device("meta"):
            model: nn.Module = build(self.config, dtype=self.dtype, **implementation)
        return model.eval()

    def fill(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        """Read the weights of `module`, which is `empty_model` or a stage of it, in place.

        Of DTensors each rank reads only its shard. Module paths are the whole model's.
        Raises: UsageError with the names of tensors of `module` that the model lacks.
        """
        state = module.state_dict(keep_vars=True)
        if unknown := state.keys() - self.sources.keys():
            raise make_weights_error(self.folder, unknown, ())
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            module.to_empty(device=device)
        else:
            _materialize(module, device)
        state = module.state_dict(keep_vars=True)
        _renew_tables(module, device)
        with torch.no_grad():
            for name, tensor in state.items():
                local, offsets = _local_part(name, tensor)
                local.copy_(self.read(name, local.shape, offsets))

    def read(self, name: str, shape: Iterable[int], offsets: Iterable[int]) -> Tensor:
        """Read the part of parameter `name` with `shape` at `offsets`, in the stored dtype.

        Only the values of the part are read from the file of a tensor that is stored as it is.
        """
        part = tuple(
            slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True)
        )
        return self.sources[name].make()[part]


@contextmanager
def open_weights(
    reference: str, *, dtype: str, remote_code: RemoteCode = "refuse"
) -> Iterator[ModelWeights]:
    """Find the weights of MODEL (a folder, a hub name or a recipe), without reading values.

    The folder may be removed on exit.
    Raises: UsageError if the tensors of the folder are not exactly those of the model, or are pickled.
    """
    if dtype not in DTYPES:
        raise UsageError(f"models cannot be loaded in {dtype!r}; known: {', '.join(DTYPES)}")
    with local_folder(resolve_model(reference), remote_code) as folder, quiet_transformers():
        if read_tensors(folder) is None:
            raise UsageError(
                f"{folder}: sharded loading needs safetensors, these weights are pickled"
            )
        config = load_config(folder, remote_code)
        model_class = find_model_class(folder, config, remote_code)
        weights = ModelWeights(folder, config, model_class, DTYPES[dtype])
        weights.sources.update(_find_sources(folder, weights.empty_model()))
        yield weights


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each tied parameter of `model` to the parameter that it is tied to.

    model: a whole model or a stage of it, where a partner may be absent.
    """
    base = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if config is None or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return {}
    # From the class, as `cut_stage` removes it from the instance.
    tied = getattr(type(base), "_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, Mapping) else {}


def _find_sources(folder: Path, model: nn.Module) -> dict[str, TensorSource]:
    """Find the stored tensors of each tensor of `model`, without reading a value.

    Raises: UsageError for missing, extra and misshapen ones.
    """
    tied = tied_names(model)
    stored = map_folder(folder)
    shapes = {name: torch.empty(one.shape, device="meta") for name, one in stored.items()}
    empty = find_sources(model, shapes)
    by_name = {source.name: source for source in empty.sources}
    missing: list[str] = []
    for name, tensor in model.state_dict().items():
        try:
            shape = by_name[tied.get(name, name)].make().shape
        except (KeyError, RuntimeError):  # lacks a tensor, or one of those that are put together
            missing.append(name)
            continue
        if shape != tensor.shape:
            raise make_shape_error(folder, name, shape, tensor.shape)
    # Files may hold both of a tied pair, and old ones rotary frequencies, which are computed.
    extra = {
        name
        for name in empty.unused
        if name not in tied and not name.endswith("rotary_emb.inv_freq")
    }
    if missing or extra:
        raise make_weights_error(folder, missing, extra)
    mapped = {one.name: one for one in find_sources(model, stored).sources}
    return {name: mapped[tied.get(name, name)] for name in model.state_dict()}


def _materialize(module: nn.Module, device: torch.device | str) -> None:
    """Allocate memory for parameters on the meta device; tied ones stay tied."""
    new: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in [*owner.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter.is_meta and id(parameter) not in new:
                new[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), parameter.requires_grad
                )
            if parameter.is_meta:
                setattr(owner, name, new[id(parameter)])


def _renew_tables(module: nn.Module, device: torch.device | str) -> None:
    """Compute the frequencies of rotary embeddings, which are buffers and not stored.

    Raises: UsageError for any other buffer.
    """
    for path, owner in [*module.named_modules()]:
        names = [*dict(owner.named_buffers(recurse=False))]
        if not names:
            continue
        if "inv_freq" not in names or not hasattr(owner, "config"):
            raise _make_unfilled_error(f"{path}.{names[0]}", "only rotary tables are known")
        fresh = cast("Any", type(owner))(config=owner.config)
        for name, buffer in fresh.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)  # noqa: SLF001 - keeps persistence


def _local_part(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of `tensor`, and its offsets in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    local = tensor.to_local()
    if any(not (p.is_replicate() or p.is_shard()) for p in tensor.placements):
        raise _make_unfilled_error(name, f"its placements are {tensor.placements}")
    dims = [getattr(p, "dim", None) for p in tensor.placements if p.is_shard()]
    if len(dims) != len({*dims}):
        raise _make_unfilled_error(name, "one dim is sharded twice; fill it before that")
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(local.shape) != tuple(shape):
        raise _make_unfilled_error(name, f"its shard is {tuple(local.shape)}, not {tuple(shape)}")
    return local, tuple(offsets)
