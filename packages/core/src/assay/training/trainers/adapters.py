"""LoRA adapters, by peft, which assay-smoke installs."""

import json
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from assay.errors import MachineError, UsageError, name_some
from assay.files import UnreadableFileError, open_file, read_json_object
from assay.foreign_text import shorten
from assay.training.state.parameters import put

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
# Settings about the origin of an adapter, which do not change its results, and the list of adapted
# layers, which is compared separately.
_NOT_COMPUTED_WITH = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
        "target_modules",
    }
)  # fmt: skip

# Small values, for a few steps of a small model.
_RANK, _ALPHA = 4, 8


def make_adapter_error(path: Path, problem: object) -> MachineError:
    """Report that the file at `path` is not an adapter of the model."""
    return MachineError(f"the adapter in {path} cannot be loaded: {shorten(problem)}")


def add_lora(model: nn.Module, dropout: float) -> nn.Module:
    """Add a trainable adapter to every linear layer but the head, and freeze the rest."""
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute of transformers 5.23 by its old name.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft corrects it
        try:
            wrapped: nn.Module = _import_peft().get_peft_model(model, lora_config(model, dropout))
        except ValueError as error:  # it adapts no state-space models
            raise UsageError(f"LoRA: {shorten(error)}") from error
    return wrapped


def lora_config(model: nn.Module, dropout: float) -> Any:  # noqa: ANN401 - peft's LoraConfig
    """Return the configuration of `add_lora`, for libraries that add adapters themselves."""
    config = getattr(model, "config", None)
    # peft passes the arguments of other tasks on as they are.
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    is_decoder = getattr(model, "can_generate", lambda: True)() and not is_encoder_decoder
    return _import_peft().LoraConfig(
        r=_RANK,
        lora_alpha=_ALPHA,
        lora_dropout=dropout,
        target_modules=_adapted(model),
        task_type="CAUSAL_LM" if is_decoder else None,
    )


def _adapted(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers, except those that peft takes for fused experts.

    Paths are listed one by one because "all-linear" of peft 0.21 includes the parameters of experts,
    for which it lacks dropout. With fused experts, the name `gate_proj` of a shared expert does too.

    Raises: UsageError if the model has no such layer.
    """
    from transformers.pytorch_utils import Conv1D

    head = cast("PreTrainedModel", model).get_output_embeddings()
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    if not paths:
        raise UsageError(f"LoRA: {type(model).__name__} has no linear layers to adapt")
    probe = _import_peft().LoraConfig(target_modules=paths)
    with suppress(ImportError):  # versions of peft that rename no targets
        renaming = import_module("peft.utils.transformers_weight_conversion")
        renaming.convert_peft_config_for_transformers(probe, model, None)
    return [path for path in paths if path in probe.target_modules]


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapter of `model`, by the names in its file."""
    # By default, peft asks the hub if embeddings were resized.
    tensors: dict[str, Tensor] = _import_peft().get_peft_model_state_dict(
        model, save_embedding_layers=False
    )
    return tensors


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapter of `model` as a peft folder."""
    cast("Any", model).save_pretrained(folder, save_embedding_layers=False)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of an adapter's file. Raises: MachineError."""
    path = folder / ADAPTER_FILE
    if folder.is_dir() and not path.exists():
        held = name_some(sorted(one.name for one in folder.iterdir())) or "nothing"
        raise MachineError(f"{folder} holds no {ADAPTER_FILE}, but {held}")
    try:
        with open_file(path):  # refuses a FIFO, which would block
            return load_file(path)
    except (OSError, UnreadableFileError, SafetensorError) as error:
        raise make_adapter_error(path, error) from error


def other_adapter_settings(model: nn.Module, folder: Path) -> dict[str, tuple[object, object]]:
    """Return settings in an adapter's folder that change results and differ from the model's.

    Returns: the model's value and the saved one, by name.
    Raises: MachineError.
    """
    path = folder / _CONFIG_FILE
    try:
        saved = read_json_object(path)
    except UnreadableFileError as error:
        raise make_adapter_error(path, error) from error
    own = cast("Any", model).peft_config["default"]
    wrong = {
        name: (value, saved.get(name))
        for name, value in sorted(own.to_dict().items())
        if name not in _NOT_COMPUTED_WITH and not _is_alike(saved.get(name), value)
    }
    # The folder may name layers of other pipeline stages.
    targets = _texts(saved.get("target_modules"))
    if not set(own.target_modules) <= targets:
        wrong["target_modules"] = sorted(own.target_modules), sorted(targets)
    return wrong


def _is_alike(saved: Any, own: object) -> bool:  # noqa: ANN401 - a value of JSON
    """Return True if a setting survived JSON; None equals an empty collection."""
    if isinstance(own, set | frozenset):
        return _texts(saved) == own
    if isinstance(own, list | tuple | dict):
        return (saved or None) == (json.loads(json.dumps(own)) or None)
    return bool(saved == own) or (saved in ([], {}) and own is None)


def _texts(saved: object) -> set[str]:
    return {one for one in saved if isinstance(one, str)} if isinstance(saved, list) else set()


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load the adapter in `folder` into `model`.

    Raises: MachineError unless the file has exactly the model's tensors; peft itself ignores missing
        ones.
    """
    found, wanted = read_adapter(folder), adapter_tensors(model)
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [tuple(side[name].shape) if name in side else None for side in (found, wanted)]
        if shapes[0] != shapes[1]:
            problem = f"{name} has shape {shapes[0]}, the model's {shapes[1]}"
            raise make_adapter_error(folder / ADAPTER_FILE, problem)
    for name, value in wanted.items():
        put(value, found[name])


def _import_peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            f"LoRA needs peft, which comes with assay-smoke: pip install assay-smoke ({error})"
        ) from error
    return peft
