"""Write sharded models as folders that transformers and peft load, bitwise equal.

Rank 0 gathers sharded tensors one by one, and writes only if every tensor of the model is there.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.errors import UsageError
from assay.models.saving import save_pretrained
from assay.parallel.checkpoints.weight_loading import (
    make_shape_error,
    make_weights_error,
    tied_names,
)

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

# File names of peft.
_ADAPTER_FILE = "adapter_model.safetensors"
_DEFAULT_ADAPTER = "default"
_LORA = "lora_"


def gather_tensors(modules: Iterable[nn.Module]) -> dict[str, Tensor] | None:
    """Gather all parameters and buffers of the model on rank 0. Called on all ranks.

    modules: the modules of this rank: the model, or its stages of a pipeline.
    Returns: on rank 0 the whole tensors on the host, by name; None on the others.
    """
    own = {name: tensor for module in modules for name, tensor in module.state_dict().items()}
    held = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
    ranks: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, held)
    gathered: dict[str, Tensor] = {}
    rank = dist.get_rank()
    # All ranks send and receive in the same order, which prevents deadlocks.
    for name in sorted({name for of_rank in ranks for name in of_rank}):
        owner = next(number for number, of_rank in enumerate(ranks) if name in of_rank)
        whole = _whole(own[name]) if name in own else None
        if rank == 0:
            if whole is None:
                shape, dtype = ranks[owner][name]
                whole = torch.empty(shape, dtype=dtype, device=_wire_device())
                dist.recv(whole, owner)
            gathered[name] = whole.cpu().clone()
        elif rank == owner and whole is not None:
            dist.send(whole.to(_wire_device()).contiguous(), 0)
    return gathered if rank == 0 else None


def save_model(folder: Path, modules: Iterable[nn.Module]) -> None:
    """Write the sharded model as a Hugging Face folder. Called on all ranks.

    modules: the modules of this rank: the model, or its stages of a pipeline.
    Raises: UsageError, on rank 0 with the names of missing and extra tensors, on the others with
        rank 0's error.
    """
    modules = [*modules]
    gathered = gather_tensors(modules)
    with _errors_reach_all_ranks(folder):
        if gathered is not None:
            write_model_folder(folder, cast("Any", modules[0]).config, gathered)


def save_adapters(folder: Path, modules: Iterable[nn.Module]) -> None:
    """Write all adapters of a model, in the layout of peft. Called on all ranks.

    The adapter `default` goes to `folder`, each other one to a folder in it.
    modules: the modules of this rank: the model of peft, or its stages, each wrapped by peft.
    Raises: UsageError unless it is plain LoRA, and for an adapter without tensors.
    """
    modules = [*modules]
    configs = _join_configs(modules)
    for name, config in configs.items():
        if str(config.peft_type.value) != "LORA" or config.modules_to_save or config.bias != "none":
            raise UsageError(
                f"adapter {name!r} cannot be put together from ranks: only LoRA without trained biases"
                " or modules_to_save can"
            )
    gathered = gather_tensors(modules)
    with _errors_reach_all_ranks(folder):
        if gathered is not None:
            for name, config in configs.items():
                target = folder if name == _DEFAULT_ADAPTER else folder / name
                _write_adapter(target, name, config, gathered)


def _join_configs(modules: Sequence[Any]) -> dict[str, Any]:
    """Return the configuration of each adapter, with the target modules of all ranks."""
    own = {
        name: {
            target
            for module in modules
            if not isinstance(module.peft_config[name].target_modules, str)
            for target in module.peft_config[name].target_modules
        }
        for name in modules[0].peft_config
    }
    of_ranks: list[dict[str, set[str]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    joined = {}
    for name, config in modules[0].peft_config.items():
        joined[name] = copy.copy(config)
        if targets := set().union(*(of_rank[name] for of_rank in of_ranks)):
            joined[name].target_modules = targets
    return joined


def write_model_folder(
    folder: Path, config: "PretrainedConfig", tensors: Mapping[str, Tensor]
) -> None:
    """Write whole tensors as the folder of the model that `config` describes.

    Raises: UsageError for missing, extra and misshapen tensors, and for tied ones that differ.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = cast("Any", AutoModelForCausalLM.from_config(config))
    tied = tied_names(model)
    wanted = model.state_dict()
    missing = wanted.keys() - tensors.keys() - tied.keys()
    extra = tensors.keys() - wanted.keys()
    if missing or extra:
        raise make_weights_error(folder, missing, extra)
    complete = dict(tensors)
    for head, name in tied.items():
        value = complete.setdefault(head, complete[name])
        if not value.equal(complete[name]):
            difference = float((value - complete[name]).abs().max())
            raise UsageError(
                f"{head} is tied to {name}, but they differ by up to {difference:.1e}: their gradients"
                " were not added up in each step"
            )
        complete[head] = complete[name]
    for name, value in complete.items():
        if value.shape != wanted[name].shape:
            raise make_shape_error(folder, name, value.shape, wanted[name].shape)
    model.load_state_dict(complete, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = next(iter(complete.values())).dtype
    save_pretrained(model, folder)


def _write_adapter(
    folder: Path, name: str, config: "PeftConfig", tensors: Mapping[str, Tensor]
) -> None:
    # peft's own function writes only tensors of modules of this process.
    own = {
        key.replace(f".{name}.", ".").removesuffix(f".{name}"): tensor.contiguous()
        for key, tensor in tensors.items()
        if _LORA in key and (f".{name}." in key or key.endswith(f".{name}"))
    }
    if not own:
        raise make_weights_error(folder, [f"the tensors of adapter {name}"], ())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    written = copy.copy(config)
    written.inference_mode = True
    written.save_pretrained(str(folder))


@contextmanager
def _errors_reach_all_ranks(folder: Path) -> Iterator[None]:
    """Make every rank raise if rank 0, which writes, raises inside."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - all ranks must stop
        error = raised
    words = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(words, src=0)
    if error is not None:
        raise error
    if words[0] is not None:
        raise UsageError(f"{folder} was not written; rank 0 raised {words[0]}")


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # The group can send only tensors on its device.
    return cast("DTensor", tensor.to(tensor.device_mesh.device_type)).full_tensor()


def _wire_device() -> torch.device:
    """Return the device whose tensors the process group can send."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    return cast("torch.device", torch.accelerator.current_accelerator())
