"""Read the files of a model folder that describe it: config.json and the tokenizer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from assay.errors import UsageError
from assay.files import read_json_object, read_text
from assay.foreign_text import shorten
from assay.models.micro.recipes import BOS_ID
from assay.models.sources import (
    RemoteCode,
    resolve_model,
    transformers_option,
    weightless_folder,
)
from assay.models.transformers_calls import quiet_transformers
from assay.models.weight_files import combine_hashes

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
    return config


def find_model_class(
    folder: Path, config: "PretrainedConfig", remote_code: RemoteCode
) -> type[Any]:
    """Find the transformers class, possibly an auto class, that loads the model in `folder`.

    Raises: UsageError if transformers lacks the class that `config` names.
    """
    import transformers

    if getattr(config, "auto_map", None) and remote_code == "trust":
        kinds = [name for name in config.auto_map if name.startswith("AutoModel")]
        known = [name for name in ("AutoModelForMaskedLM", "AutoModelForCausalLM") if name in kinds]
        name = (known or kinds or ["AutoModelForCausalLM"])[0]
        remote: type[Any] = getattr(transformers, name)
        return remote
    name = config.architectures[0] if config.architectures else None
    if name is None:
        return transformers.AutoModelForCausalLM
    found: type[Any] | None = getattr(transformers, str(name), None)
    if found is None:
        raise UsageError(
            f"{folder / 'config.json'}: architectures: {name!r} is unknown to transformers"
        )
    return found


class Settings:
    """A configuration and those inside it, the outer ones first, in which the same setting has several names."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - of transformers
        self.parts = [config]
        for part in self.parts:
            self.parts += (one for one in vars(part).values() if hasattr(one, "model_type"))

    def read(self, *keys: str) -> Any:  # noqa: ANN401 - a value of a configuration
        """Return the first value that is not None."""
        found = (getattr(part, key, None) for key in keys for part in self.parts)
        return next((value for value in found if value is not None), None)


def attention_of(model: object) -> str:
    """Return the attention implementation of a module or a `LoadedModel`."""
    config = getattr(model, "config", None)
    return str(getattr(config, "_attn_implementation", None) or "eager")


def attentions_of(config: Any) -> Any:  # noqa: ANN401 - of transformers
    """Return the attention implementation of a configuration, or those of its parts, as `from_pretrained` takes them."""
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    found = {
        key: getattr(part, "_attn_implementation", None)
        for key, part in {"": config, **parts}.items()
        if part is not None
    }
    return found if len({*found.values()}) > 1 else found[""]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0]) if lines else error.__class__.__name__


Message = Mapping[str, str]
NUM_BYTES = 256
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", _TOKENIZER_CONFIG, "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Functions that encode text as a model's token ids."""

    kind: Literal["own", "bytes", "none"]
    """The folder's tokenizer, UTF-8 bytes (after the BOS token if it has id 256), or bytes modulo a small vocabulary."""
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[Sequence[Message]], list[int]] | None
    """Apply the chat template; None if there is none."""
    hash: str
    pad_token_id: int | None = None


def find_tokenizing(
    folder: Path, *, vocab_size: int, bos_token_id: int | None, remote_code: RemoteCode
) -> Tokenizing:
    """Return the tokenizer in `folder`, otherwise bytes, modulo a small vocabulary."""
    files = {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
    if files:
        return _own_tokenizer(folder, files, remote_code)
    if vocab_size >= NUM_BYTES:
        return byte_tokenizer(starts_with_bos=bos_token_id == BOS_ID)
    return _no_tokenizer(vocab_size)


def byte_tokenizer(*, starts_with_bos: bool) -> Tokenizing:
    """Make a tokenizer whose ids are UTF-8 bytes."""
    prefix = [BOS_ID] if starts_with_bos else []

    def encode(text: str) -> list[int]:
        return prefix + list(text.encode())

    kind = "bytes after a begin token" if starts_with_bos else "bytes"
    return Tokenizing("bytes", encode, None, xxhash.xxh3_128_hexdigest(kind.encode()))


def load_tokenizer(folder: Path, remote_code: RemoteCode) -> Any:  # noqa: ANN401 - transformers
    """Load the tokenizer in `folder` with transformers. Raises: UsageError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, **transformers_option(remote_code)
        )
        tokenizer.encode("a")  # fails if a setting has the wrong type
    except Exception as error:  # any: each tokenizer class fails differently
        files = ", ".join(name for name in _TOKENIZER_FILES if (folder / name).is_file())
        wrong = f"the tokenizer in {folder} ({files}) cannot be loaded: {first_line(error)}"
        raise UsageError(wrong if files else f"{folder} has no tokenizer files") from error
    return tokenizer


def _own_tokenizer(folder: Path, files: Mapping[str, Path], remote_code: RemoteCode) -> Tokenizing:
    tokenizer = load_tokenizer(folder, remote_code)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text))

    def encode_chat(messages: Sequence[Message]) -> list[int]:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    return Tokenizing(
        "own",
        encode,
        encode_chat if tokenizer.chat_template else None,
        _hash_without_template(files),
        tokenizer.pad_token_id,
    )


# Of tokenizer_config.json; newer models have a file instead.
_TEMPLATE, _TEMPLATE_FILE = "chat_template", "chat_template.jinja"
# Keys that move no token: how it was loaded, which transformers stores when it saves it again, and the side of
# padding, which is the left one for all.
_WITHOUT_TOKENS = (
    "is_local", "local_files_only", "name_or_path", "tokenizer_file", "special_tokens_map_file",
    "padding_side",
)  # fmt: skip


def _hash_without_template(files: Mapping[str, Path]) -> str:
    """Combine the hashes of a tokenizer's files. A chat template makes prompts, and no ids of a text."""
    contents = {name: _content_of(path) for name, path in files.items() if name != _TEMPLATE_FILE}
    return combine_hashes(
        {name: xxhash.xxh3_128_hexdigest(content) for name, content in contents.items()}
    )


def _content_of(file: Path) -> bytes:
    """Return a file's bytes; of JSON, those of its values, whatever their spacing, escapes and order of keys."""
    values = _values_of(file)
    return file.read_bytes() if values is None else _encode(values)


def _values_of(file: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the values of a JSON file, without a chat template and what moves no token; None for another file."""
    if file.suffix != ".json":
        return None
    content = file.read_bytes()
    try:
        values = json.loads(content)
    except ValueError:  # of a file that this tokenizer does not read
        return None
    if file.name == _TOKENIZER_CONFIG and isinstance(values, dict):
        for key in (_TEMPLATE, *_WITHOUT_TOKENS):
            values.pop(key, None)
    return values


def _encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def record_tokenizer(model: str) -> dict[str, str]:
    """Return the hash of each part of a model's tokenizer, as "tokenizer.json: normalizer"; {} without its files."""
    found: dict[str, str] = {}
    with weightless_folder(resolve_model(model), "refuse") as folder:
        for name in _TOKENIZER_FILES:
            file = folder / name
            if not file.is_file() or name == _TEMPLATE_FILE:
                continue
            values = _values_of(file)
            if isinstance(values, dict) and name in ("tokenizer.json", _TOKENIZER_CONFIG):
                inner = values.pop("model", None)
                if isinstance(inner, dict):
                    values |= {"vocabulary": inner.pop("vocab", None), "model": inner}
                parts = {f"{name}: {key}": _encode(value) for key, value in values.items()}
            else:
                parts = {name: _content_of(file)}
            found |= {part: xxhash.xxh3_64_hexdigest(content) for part, content in parts.items()}
    return found


def _read_template(folder: Path) -> object:
    """Return the chat template of a model folder; None without one."""
    if (folder / _TEMPLATE_FILE).is_file():
        return read_text(folder / _TEMPLATE_FILE)
    file = folder / _TOKENIZER_CONFIG
    return read_json_object(file).get(_TEMPLATE) if file.is_file() else None


def _no_tokenizer(vocab_size: int) -> Tokenizing:
    """Encode bytes modulo the vocabulary: ids that the model takes, but no text."""

    def encode(text: str) -> list[int]:
        return [byte % vocab_size for byte in text.encode()]

    return Tokenizing("none", encode, None, xxhash.xxh3_128_hexdigest(b"none"))


# Set if the head shares the weight of the embedding.
TIED = "tie_word_embeddings"
# Facts on the writer and on the form of the weights, which are compared themselves.
_ON_THE_FILE = frozenset({
    "transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype", "quantization_config",
    "compression_config",
})  # fmt: skip


def load_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a model folder with the defaults of their class, as in `flatten_settings`.

    Returns: None if transformers refuses them.
    """
    try:
        with quiet_transformers():
            return flatten_settings(load_config(folder, "refuse").to_dict())
    except UsageError:
        return None


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the keys of all tables, joined by points, without facts on the file."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and key not in _ON_THE_FILE:
            found |= flatten_settings(value, f"{prefix}{key}.")
        elif key not in _ON_THE_FILE:
            found[f"{prefix}{key}"] = value
    return found


_OF_CONFIG = "config.json: "
STORED_DTYPE = f"{_OF_CONFIG}dtype"
_PADDING_SIDE = f"{_TOKENIZER_CONFIG}: padding_side"
_WITHOUT_EFFECT = (
    f"{STORED_DTYPE} ", "config.json: bos_token_id ", "config.json: eos_token_id ", "generation_config.json: ",
    "chat template: ", f"{_PADDING_SIDE} ",
)  # fmt: skip


def record_settings(model: str, remote_code: RemoteCode = "refuse") -> dict[str, Any]:
    """Return the values of config.json and generation_config.json, by file and key, and two facts on the tokenizer.

    A key is written "config.json: hidden_size".
    """
    found: dict[str, Any] = {}
    with weightless_folder(resolve_model(model), remote_code) as folder:
        for file in ("config.json", "generation_config.json"):
            if (folder / file).is_file():
                values = read_json_object(folder / file)
                found |= flatten_settings(values, f"{file}: ")
                if file == "config.json":
                    found[STORED_DTYPE] = values.get("dtype", values.get("torch_dtype"))
        if (template := _read_template(folder)) is not None:
            found["chat template: hash"] = xxhash.xxh3_64_hexdigest(json.dumps(template).encode())
        if (folder / _TOKENIZER_CONFIG).is_file():
            side = read_json_object(folder / _TOKENIZER_CONFIG).get("padding_side")
            found |= {} if side is None else {_PADDING_SIDE: side}
    return found


def restore_settings(values: dict[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Change the values of a config.json into those of `record_settings`, where these can move outputs.

    Returns: False if the recorded ones do not suffice.
    """
    for name in _changed_settings(values, recorded):
        *tables, key = name.removeprefix(_OF_CONFIG).split(".")
        table = values
        for one in tables:
            inner = table.setdefault(one, {})
            if not isinstance(inner, dict):
                return False
            table = inner
        if name in recorded:
            table[key] = recorded[name]
        else:
            table.pop(key, None)
    return not _changed_settings(values, recorded)


def _changed_settings(values: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    config = {name: value for name, value in recorded.items() if name.startswith(_OF_CONFIG)}
    now = _without_unrecorded_nulls(recorded, flatten_settings(values, _OF_CONFIG))
    return [name for name in _names_of_changes(config, now) if can_move_outputs(f"{name} ")]


def list_changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """List the changes of named values: "torch 2.11.0 → 2.13.0"."""

    def shown(side: Mapping[str, object], name: str) -> str:
        if name not in side:
            return "absent"
        return "null" if side[name] is None else shorten(side[name])

    return [
        f"{name} {shown(then, name)} → {shown(now, name)}" for name in _names_of_changes(then, now)
    ]


def _names_of_changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ. Null differs from an absent key, which takes the default of its class."""
    return sorted(
        name
        for name in then.keys() | now.keys()
        if (name in then, then.get(name)) != (name in now, now.get(name))
    )


def _without_unrecorded_nulls(
    recorded: Mapping[str, object], now: Mapping[str, object]
) -> Mapping[str, object]:
    """Leave nulls out of `now` if the record has none: older records left them out."""
    if any(value is None for name, value in recorded.items() if name != STORED_DTYPE):
        return now
    return {name: value for name, value in now.items() if value is not None or name in recorded}


def list_setting_changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """List the changes of recorded settings; none if a record lacks them."""
    return list_changes(then, _without_unrecorded_nulls(then, now)) if then and now else []


def describe_setting_changes(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Name changed settings that can move outputs, in a sentence that how to renew the golden ends; "" without any."""
    changes = "; ".join(filter(can_move_outputs, list_setting_changes(then, now)))
    advice = "Restore the file; if the change is intended,"
    return f"changed since the golden: {changes}. {advice}" if changes else ""


def can_move_outputs(change: str) -> bool:
    """Return False for a change that no output under given tokens can depend on.

    A run loads the dtype of its RUN. The ids that begin or end a text, and a chat template, choose tokens alone.
    """
    return not change.startswith(_WITHOUT_EFFECT)
