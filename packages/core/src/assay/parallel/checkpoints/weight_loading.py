"""Read weights by name: each rank reads only the tensors of its own modules from a folder.

The whole model is built on the meta device, which costs no memory; modules of other ranks are removed
and the rest is filled. Every rank checks names and shapes of all tensors before it reads a value, so
that all ranks fail together.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from assay.errors import UsageError, name_some
from assay.models.folders import local_folder
from assay.models.loading.configs import find_model_class, load_config
from assay.models.loading.loaded_model import DTYPES
from assay.models.remote_code import RemoteCode
from assay.models.sources import resolve_model
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files import reading
from assay.parallel.checkpoints.stored_names import Assembly, assembly_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def name_difference(missing: Iterable[str], extra: Iterable[str]) -> str:
    """Name the missing and the extra tensors of a file."""
    kinds = (("missing", sorted(missing)), ("extra", sorted(extra)))
    return "; ".join(f"{kind}: {name_some(names)}" for kind, names in kinds if names)


class WeightsError(UsageError):
    """A folder whose tensors are not exactly those of the model, or cannot be read by name."""

    @classmethod
    def pickled(cls, folder: Path) -> "WeightsError":
        """Make the error for pickled weights, which cannot be read tensor by tensor."""
        return cls(f"{folder}: sharded loading needs safetensors, these weights are pickled")

    @classmethod
    def differing(
        cls, folder: Path, missing: Iterable[str], extra: Iterable[str]
    ) -> "WeightsError":
        """Make the error for names that the folder (`missing`) or the model (`extra`) lacks."""
        names = name_difference(missing, extra)
        return cls(f"{folder} does not hold the tensors of its model; {names}")

    @classmethod
    def misshapen(
        cls, folder: Path, name: str, stored: tuple[int, ...], needed: tuple[int, ...]
    ) -> "WeightsError":
        """Make the error for a stored tensor of another shape than the model's."""
        return cls(f"{folder}: {name} has the shape {list(stored)}, the model needs {list(needed)}")

    @classmethod
    def of_rank_0(cls, folder: Path, words: str) -> "WeightsError":
        """Make the error of all other ranks; `words`: class and message of rank 0's error."""
        return cls(f"{folder} was not written; rank 0 raised {words}")

    @classmethod
    def unfilled(cls, name: str, why: str) -> "WeightsError":
        """Make the error for a tensor whose values can neither be read nor computed."""
        return cls(f"{name} cannot be filled: {why}")


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The weights of one model in a folder, read on demand; made by `open_weights`."""

    folder: Path
    config: "PretrainedConfig"
    model_class: type[Any]
    dtype: torch.dtype
    files: Mapping[str, Path]
    assemblies: Mapping[str, Assembly]
    """The stored tensors of each parameter or buffer."""
    read_names: set[str] = field(default_factory=set)
    """The stored tensors that this process has read so far."""

    def empty_model(self, attention: str | None = None) -> nn.Module:
        """Build the whole model on the meta device, in evaluation mode.

        attention: name of an implementation of transformers; None for its default.
        """
        return _empty_model(self.model_class, self.config, self.dtype, attention)

    def fill(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        """Read the weights of `module`, which is `empty_model` or a stage of it, in place.

        Of DTensors each rank reads only its shard. Module paths are the whole model's.
        Raises: WeightsError with the names of tensors of `module` that the model lacks.
        """
        state = module.state_dict(keep_vars=True)
        if unknown := state.keys() - self.assemblies.keys():
            raise WeightsError.differing(self.folder, unknown, ())
        if any(isinstance(tensor, DTensor) for tensor in state.values()):
            module.to_empty(device=device)
            state = module.state_dict(keep_vars=True)
        else:
            _materialize(module, device)
            state = module.state_dict(keep_vars=True)
        _renew_tables(module, device)
        with torch.no_grad():
            for name, tensor in state.items():
                local, offsets = _local_part(name, tensor)
                local.copy_(self.read(name, local.shape, offsets))

    def read(self, name: str, shape: Iterable[int], offsets: Iterable[int]) -> Tensor:
        """Read the part of parameter `name` with `shape` at `offsets`, in the stored dtype."""
        part = tuple(
            slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True)
        )
        assembly = self.assemblies[name]
        self.read_names.update(assembly.stored_names)
        if assembly.is_plain:
            with safe_open(self.files[assembly.stored_names[0]], framework="pt") as file:
                return cast("Tensor", file.get_slice(assembly.stored_names[0])[part])
        return assembly.assemble(self._read_whole)[part]

    def _read_whole(self, stored_name: str) -> Tensor:
        with safe_open(self.files[stored_name], framework="pt") as file:
            return cast("Tensor", file.get_tensor(stored_name))


@contextmanager
def open_weights(
    reference: str, *, dtype: str, remote_code: RemoteCode = "refuse"
) -> Iterator[ModelWeights]:
    """Find the weights of MODEL (a folder, a hub name or a recipe), without reading values.

    The folder may be removed on exit.
    Raises: WeightsError if the tensors of the folder are not exactly those of the model.
    """
    if dtype not in DTYPES:
        raise UsageError(f"models cannot be loaded in {dtype!r}; known: {', '.join(DTYPES)}")
    with local_folder(resolve_model(reference), remote_code) as folder, quiet_transformers():
        stored = reading.read_tensors(folder)
        if stored is None:
            raise WeightsError.pickled(folder)
        config = load_config(folder, remote_code)
        model_class = find_model_class(folder, config, remote_code)
        shapes = {tensor.name: tensor.shape for tensor in stored}
        model = _empty_model(model_class, config, DTYPES[dtype], None)
        yield ModelWeights(
            folder=folder,
            config=config,
            model_class=model_class,
            dtype=DTYPES[dtype],
            files={tensor.name: tensor.file for tensor in stored},
            assemblies=_find_assemblies(folder, model, shapes),
        )


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


def _empty_model(
    model_class: type[Any],
    config: "PretrainedConfig",
    dtype: torch.dtype,
    attention: str | None,
) -> nn.Module:
    implementation = {} if attention is None else {"attn_implementation": attention}
    build = getattr(model_class, "_from_config", None) or model_class.from_config
    with torch.device("meta"):
        model: nn.Module = build(config, dtype=dtype, **implementation)
    return model.eval()


def _find_assemblies(
    folder: Path, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Assembly]:
    """Find the stored tensors of each tensor of `model`.

    shapes: of all stored tensors. Raises: WeightsError for missing, extra and misshapen ones.
    """
    tied = tied_names(model)
    model_type = cast("Any", model).config.model_type
    found: dict[str, Assembly] = {}
    missing: list[str] = []
    for name, tensor in model.state_dict().items():
        assembly = assembly_of(model_type, tied.get(name, name), shapes)
        if assembly is None:
            missing.append(name)
            continue
        stored_shape = assembly.shape(shapes)
        if stored_shape != tuple(tensor.shape):
            raise WeightsError.misshapen(folder, name, stored_shape, tuple(tensor.shape))
        found[name] = assembly
    used = {stored for assembly in found.values() for stored in assembly.stored_names}
    # Files may hold both of a tied pair, and old ones rotary frequencies, which are computed.
    extra = {
        name
        for name in shapes.keys() - used - tied.keys()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if missing or extra:
        raise WeightsError.differing(folder, missing, extra)
    return found


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

    Raises: WeightsError for any other buffer.
    """
    for path, owner in [*module.named_modules()]:
        names = [*dict(owner.named_buffers(recurse=False))]
        if not names:
            continue
        if "inv_freq" not in names or not hasattr(owner, "config"):
            raise WeightsError.unfilled(f"{path}.{names[0]}", "only rotary tables are known")
        fresh = cast("Any", type(owner))(config=owner.config)
        for name, buffer in fresh.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)  # noqa: SLF001 - keeps persistence


def _local_part(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of `tensor`, and its offsets in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    local = tensor.to_local()
    if any(not (p.is_replicate() or p.is_shard()) for p in tensor.placements):
        raise WeightsError.unfilled(name, f"its placements are {tensor.placements}")
    dims = [getattr(p, "dim", None) for p in tensor.placements if p.is_shard()]
    if len(dims) != len({*dims}):
        raise WeightsError.unfilled(name, "one dim is sharded twice; fill it before that")
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(local.shape) != tuple(shape):
        raise WeightsError.unfilled(name, f"its shard is {tuple(local.shape)}, not {tuple(shape)}")
    return local, tuple(offsets)
