"""Checkpoints of divided models: to resume on any mesh, and whole for transformers and peft.

All ranks call these functions. Each holds the model, its shards or its stage of a pipeline, in which
parameters keep the names of the whole model.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from assay.errors import MachineError, UsageError
from assay.foreign_text import shorten
from assay.models.transformers_calls import save_pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names of peft.
_ADAPTER_FILE, _DEFAULT_ADAPTER = "adapter_model.safetensors", "default"

# By name of the parameter, as the stages of a pipeline have other groups of parameters.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
) -> None:
    """Write this rank's part of a training state. extra: other state, equal on all ranks."""
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    save({"model": weights, "optimizer": moments, "extra": dict(extra)}, checkpoint_id=folder)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Read this rank's part of a training state, which any number of ranks have written.

    extra: of the same names as the saved one. Returns: the saved `extra`.
    Raises: MachineError for a folder that is not a checkpoint of this model.
    """
    weights, moments = get_state_dict(model, optimizer, options=_OPTIONS)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "extra": dict(extra)}
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise MachineError(f"{folder} cannot be loaded: {shorten(cause)}") from error
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=_OPTIONS
    )
    return cast("dict[str, Any]", state["extra"])


def save_model(folder: Path, model: nn.Module) -> None:
    """Write the whole model as a Hugging Face folder.

    Raises: MachineError, on rank 0 for what it cannot write, on the others with rank 0's words.
    """
    tensors = gather_tensors(model)
    with _errors_reach_all_ranks(folder):
        if tensors is not None:
            write_model_folder(folder, cast("Any", model).config, tensors)


def save_adapter(folder: Path, model: nn.Module) -> None:
    """Write the whole LoRA adapter of a model of peft as a folder of peft.

    Raises: UsageError for an adapter that trains more than LoRA's matrices; MachineError as `save_model`.
    """
    config = cast("Any", model).peft_config[_DEFAULT_ADAPTER]
    if config.modules_to_save or config.bias != "none":
        raise UsageError(
            "only LoRA without biases and modules_to_save can be put together from ranks"
        )
    targets: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(targets, set(config.target_modules))
    written = copy.copy(config)
    written.target_modules, written.inference_mode = set().union(*targets), True
    tensors = gather_tensors(model)
    with _errors_reach_all_ranks(folder):
        if tensors is not None:
            _write_adapter_folder(folder, written, tensors)


def gather_tensors(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather all parameters and buffers of the ranks' models on rank 0, one by one.

    Returns: on rank 0 the whole tensors on the host, by name; None on the others.
    """
    own = model.state_dict()
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


def write_model_folder(
    folder: Path, config: "PretrainedConfig", tensors: Mapping[str, Tensor]
) -> None:
    """Write whole tensors as the folder of the model that `config` describes.

    Raises: MachineError for missing, extra and misshapen tensors, and for tied ones that differ.
    """
    import transformers

    name = (config.architectures or [""])[0]
    # The class of a model's own code is not in transformers.
    model_class: Any = getattr(transformers, name, transformers.AutoModelForCausalLM.from_config)
    # Some models draw random numbers as they are made.
    with torch.device("meta"), torch.random.fork_rng(devices=()):
        model = model_class(config)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise MachineError(f"{folder} was not written: {shorten(error)}") from error
    for head, source in model.all_tied_weights_keys.items():
        if not tensors[head].equal(tensors[source]):
            raise MachineError(f"{folder} was not written: {head} is tied to {source}, but differs")
    model.tie_weights()
    model.config.dtype = next(iter(tensors.values())).dtype
    save_pretrained(model, folder)


def _write_adapter_folder(folder: Path, config: Any, tensors: Mapping[str, Tensor]) -> None:  # noqa: ANN401 - of peft
    # peft's own function writes only tensors of modules of this process.
    adapter = {
        name.replace(f".{_DEFAULT_ADAPTER}", ""): tensor
        for name, tensor in tensors.items()
        if ".lora_" in name
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter, folder / _ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


@contextmanager
def _errors_reach_all_ranks(folder: Path) -> Iterator[None]:
    """Make every rank raise if rank 0, which writes, raises inside. Others would wait for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - all ranks must stop
        error = raised
    words = [str(error) if error else None]
    dist.broadcast_object_list(words, src=0)
    if error is not None:
        raise error
    if words[0] is not None:
        raise MachineError(f"{folder} was not written; rank 0: {words[0]}")


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
