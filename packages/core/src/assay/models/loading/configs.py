"""Load config.json of a model folder, and find the model class."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError
from assay.files import read_json_object
from assay.foreign_text import shorten
from assay.models.remote_code import RemoteCode, transformers_option

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_config(folder: Path, remote_code: RemoteCode) -> "PretrainedConfig":
    """Load the configuration in `folder`. Raises: UsageError unless the model type is known."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"model folder {folder} has no config.json")
    raw = read_json_object(path)
    model_type = raw.get("model_type")
    is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if "auto_map" in raw and remote_code == "refuse" and not is_known:
        raise UsageError(
            f"{path}: model_type {model_type!r} needs code that comes with the model;"
            " read it, then allow it with --trust-remote-code"
        )
    if "auto_map" not in raw and not is_known:
        raise UsageError(f"{path}: model_type {model_type!r} is unknown to transformers")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, **transformers_option(remote_code)
        )
    except Exception as error:  # any: each configuration class validates differently
        raise UsageError(f"{path} is refused by transformers: {first_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{path}: encoder-decoder models ({model_type}) are not supported")
    return config


def find_model_class(
    folder: Path, config: "PretrainedConfig", remote_code: RemoteCode
) -> type[Any]:
    """Find the transformers class, possibly an auto class, that loads the model in `folder`.

    Raises: UsageError if transformers lacks the class that `config` names.
    """
    import transformers

    if getattr(config, "auto_map", None) and remote_code == "trust":
        masked = "AutoModelForMaskedLM" in config.auto_map
        return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    name = config.architectures[0] if config.architectures else None
    if name is None:
        return transformers.AutoModelForCausalLM
    found: type[Any] | None = getattr(transformers, str(name), None)
    if found is None:
        raise UsageError(
            f"{folder / 'config.json'}: architectures: {name!r} is unknown to transformers"
        )
    return found


def attention_of(model: object) -> str:
    """Return the attention implementation of a module or a `LoadedModel`."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "eager")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0]) if lines else error.__class__.__name__
