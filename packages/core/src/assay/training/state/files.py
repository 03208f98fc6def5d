"""Stores nested states without pickle: tensors in a safetensors file, the rest in a JSON file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay.files import (
    UnreadableFileError,
    open_file,
    read_sealed_json,
    seal,
    write_whole,
)
from assay.models.weight_files import hash_tensor
from assay.trace import Trace

_TENSORS = "tensors_digest"
_CHUNK_BYTES = 1 << 22


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested tensors and JSON values as PATH.safetensors and PATH.json.

    The JSON file has the digests of both.
    """
    tensors: dict[str, Tensor] = {}
    structure = _to_json(state, tensors)
    file = path.with_suffix(".safetensors")
    _copy_shared(tensors)
    save_file(tensors, file)
    text = seal({"state": structure, _TENSORS: _hash_file(file)})
    write_whole(path.with_suffix(".json"), text)


def read_state(path: Path) -> dict[str, Any]:
    """Read the files of `write_state`, with every tensor on the CPU.

    Raises: UnreadableFileError if either file is damaged or changed.
    """
    content = read_sealed_json(path.with_suffix(".json"))
    file = path.with_suffix(".safetensors")
    if _hash_file(file) != content.get(_TENSORS):
        raise UnreadableFileError.of(
            file, "it was changed after assay wrote it: its digest differs"
        )
    try:
        return cast("dict[str, Any]", _from_json(content["state"], load_file(file)))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UnreadableFileError.of(file, error) from error


def _hash_file(path: Path) -> str:
    """Hash the bytes of a file of gigabytes: four times as fast as `file_digest`."""
    hasher = xxhash.xxh3_128()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def state_file(golden: Path, step: int) -> Path:
    """Return the path of the state before a step."""
    return golden / f"state-{step}"


def read_golden_state(golden: Path, step: int) -> dict[str, Any]:
    """Read the state before a step, rounded to the candidate's dtype."""
    return read_state(state_file(golden, step))


def fingerprint(state: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each leaf of `state` by its path: equal exactly if all bits are.

    A sequence without tensors and dictionaries, such as the state of Python's generator, is one leaf.
    """
    return {path: hash_value(leaf) for path, leaf in leaves_of(state)}


def leaves_of(state: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the leaves of `fingerprint` by path."""
    for path, leaf in _values(state, ""):
        yield path.removeprefix("."), leaf


def hash_value(leaf: object) -> str:
    """Hash one leaf of a state with its dtype and shape: equal exactly if all bits are."""
    if isinstance(leaf, Tensor):
        return hash_tensor(leaf)
    return xxhash.xxh3_128_hexdigest(repr(leaf).encode())


def _values(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values(item, f"{path}.{key}")
    elif isinstance(value, list | tuple) and not _is_plain(value):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}.{index}")
    else:
        yield path, value


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return not isinstance(value, Mapping | Tensor)


def _copy_shared(tensors: dict[str, Tensor]) -> None:
    """Copy tensors that share memory, as tied weights do: safetensors refuses them."""
    seen = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        if memory in seen:
            tensors[name] = tensor.clone()
        seen.add(memory)


# Values that JSON lacks become an object with one key, "tensor", "tuple" or "pairs". Dictionaries are
# pairs because their keys may be numbers.
def _to_json(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"pairs": [[key, _to_json(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_to_json(item, tensors) for item in value]
    return value


def _from_json(value: object, tensors: Mapping[str, Tensor]) -> object:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in content)
    return {key: _from_json(item, tensors) for key, item in content}


NOISE = "noise"
# In the noise run's trace: modules whose own code only rounded element by element; buffers and frozen
# parameters of the reference's model.
POINTWISE, UNTRAINED = "pointwise", "untrained"


def read_names(golden: Path, kind: str) -> frozenset[str]:
    """Read the modules POINTWISE, or the buffers and frozen parameters UNTRAINED."""
    names: Any = Trace.open(golden / NOISE).attachment_json(kind)
    return frozenset(names)
