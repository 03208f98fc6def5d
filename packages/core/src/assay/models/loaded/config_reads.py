"""Record which keys of a configuration a model's code reads."""

# ruff: noqa: ANN401 - objects of transformers

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# Dicts whose keys are tracked one by one because the code reads them by name. Other dicts (label names,
# quantization settings) are passed on whole.
ROPE_KEYS = ("rope_parameters", "rope_scaling")

# Code that reads every key: copies, comparisons, files, default settings.
_BULK_READERS = (
    "transformers.configuration_utils", "transformers.generation", "huggingface_hub", "copy",
    "copyreg", "dataclasses", "json", "assay",
)  # fmt: skip
# Prefixes of functions that read a value only to validate or move it.
_MOVERS = ("validate", "_validate", "standardize", "convert_rope", "_check")


@dataclass(slots=True)
class ConfigReads:
    """Keys that were read."""

    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Attributes, by the name of the configuration's class."""
    absent: set[str] = field(default_factory=set)
    """Missing attributes that were asked for, so that the code used a default."""
    inner: set[str] = field(default_factory=set)
    """Keys of the dicts `ROPE_KEYS`."""


@contextmanager
def trace_reads() -> Iterator[ConfigReads]:
    """Record which attributes of configurations a model's code reads inside this context."""
    from transformers import PretrainedConfig

    reads = ConfigReads()
    traced_dict = _traced_dict(reads)
    config_class: Any = PretrainedConfig
    original = config_class.__getattribute__

    def read(self: Any, key: str) -> Any:
        try:
            value = original(self, key)
        except AttributeError:
            if _is_models_code(sys._getframe(1)):  # noqa: SLF001 - the caller
                reads.absent.add(key)
            raise
        if key.startswith("_") or not _is_models_code(sys._getframe(1)):  # noqa: SLF001 - the caller
            return value
        key = original(self, "attribute_map").get(key, key)
        reads.attributes[type(self).__name__].add(key)
        if key in ROPE_KEYS and type(value) is dict:
            value = traced_dict(value)
            original(self, "__dict__")[ROPE_KEYS[0]] = value
        return value

    config_class.__getattribute__ = read
    try:
        yield reads
    finally:
        config_class.__getattribute__ = original


def _is_models_code(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if any(module == reader or module.startswith(f"{reader}.") for reader in _BULK_READERS):
        return False
    return not frame.f_code.co_name.startswith(_MOVERS)


def _traced_dict(reads: ConfigReads) -> type[dict[str, Any]]:
    """Make a dict class that records in `reads` which keys are read one by one."""

    def note(key: object) -> None:
        if isinstance(key, str) and _is_models_code(sys._getframe(2)):  # noqa: SLF001 - the caller
            reads.inner.add(key)

    class TracedDict(dict[str, Any]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            for key, value in self.items():
                if type(value) is dict:  # for each kind of layer
                    super().__setitem__(key, TracedDict(value))

        def __getitem__(self, key: str) -> Any:
            note(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            note(key)
            return super().get(key, default)

        def pop(self, key: str, *default: Any) -> Any:
            note(key)
            return super().pop(key, *default)

    return TracedDict
