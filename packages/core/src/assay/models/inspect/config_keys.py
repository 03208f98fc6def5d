"""Find keys of config.json that a model's code does not read, and guess the intended key."""

# ruff: noqa: ANN401 - objects of transformers

import difflib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from assay.files import read_toml
from assay.models.inspect.report import UnreadKey

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


# From this similarity on (2 x common letters / all letters), a name counts as another one misspelled.
# One missing letter of ten or more is above 0.9, `rope_params` for `rope_parameters` is 0.85.
# `attn_bias` for `attention_bias` is 0.78 and may be a separate key.
MISSPELT = 0.84

# Least similarity of the nearest name in a message: difflib's default.
NEAREST = 0.6


# Base classes of every model. They read common keys, and copy the others.
_GENERAL = ("transformers.configuration_utils", "transformers.modeling_utils", "torch", "builtins")


@cache
def inert_keys() -> Mapping[str, str]:
    """Return the keys that do not affect a check, with the reasons."""
    groups = read_toml(Path(__file__).with_name("inert_keys.toml"))
    return {key: reason for group in groups.values() for key, reason in group.items()}


@dataclass(frozen=True, slots=True)
class KeyReader:
    """The code that may read a key of config.json."""

    reads: ConfigReads
    """Keys read while the model was built and run."""
    model_class: type
    """Its source names keys that it reads only in other cases."""

    def find_unread(
        self, raw: Mapping[str, Any], config: Any, prefix: str = ""
    ) -> tuple[list[UnreadKey], int]:
        """Return the keys of a config.json that no code reads, and the number of checked keys.

        config: the configuration that transformers made of `raw`.
        """
        from transformers import PretrainedConfig

        unread: list[UnreadKey] = []
        num_keys = 0
        read = self.reads.attributes.get(type(config).__name__, set())
        for key, value in raw.items():
            name = config.attribute_map.get(key, key)
            if key in inert_keys() or key.startswith("_") or value is None:
                continue
            try:
                is_known = hasattr(config, name)
            except Exception:  # noqa: BLE001, S112 - transformers refuses what each layer has its own of
                continue  # neither read nor counted
            num_keys += 1
            if not is_known:
                # The class converted an older name of a rotary parameter.
                rope = getattr(config, ROPE_KEYS[0], None)
                if isinstance(rope, Mapping) and rope.get(key, value) != value:
                    unread.append(_overridden(f"{prefix}{key}", value, rope[key]))
                continue
            own = getattr(config, name)
            if isinstance(own, PretrainedConfig) and isinstance(value, Mapping):
                found, num_inner = self.find_unread(value, own, f"{prefix}{key}.")
                unread += found
                num_keys += num_inner
            elif name in ROPE_KEYS and isinstance(value, Mapping) and self.reads.inner:
                unread += self._unread_rope_keys(value, own, f"{prefix}{key}.")
            elif name not in read and not self._has_no_effect(config, name, value):
                unread.append(_describe(key, prefix, _names(config, read), raw, config))
        return unread, num_keys

    def _unread_rope_keys(
        self, value: Mapping[str, Any], own: object, prefix: str
    ) -> list[UnreadKey]:
        """Return the rotary parameters that no code read, separately for each kind of layer."""
        unread = []
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                within = own.get(key) if isinstance(own, Mapping) else None
                unread += self._unread_rope_keys(inner, within, f"{prefix}{key}.")
            elif key in self.reads.inner or not isinstance(own, Mapping) or key not in own:
                # The class renamed keys with an older name, and names of types.
                is_number = isinstance(inner, int | float)
                if is_number and isinstance(own, Mapping) and own.get(key, inner) != inner:
                    unread.append(_overridden(f"{prefix}{key}", inner, own[key]))
            elif key in self.reads.absent:
                unread.append(UnreadKey(key=f"{prefix}{key}", problem="misplaced", nearest=key))
            else:
                unread.append(_describe(key, prefix, self.reads.inner, value))
        return unread

    def _has_no_effect(self, config: Any, name: str, value: object) -> bool:
        """Return True for the default value, or for a key that is read only in other cases."""
        if name in type(config).__dict__ and getattr(type(config), name) == value:
            return True
        names = [name, *(alias for alias, of in config.attribute_map.items() if of == name)]
        return any(_is_named_by((self.model_class, type(config)), one) for one in names)


def _overridden(key: str, stored: object, used: object) -> UnreadKey:
    return UnreadKey(key=key, problem="overridden", used=repr(used), stored=repr(stored))


def _names(config: Any, read: Iterable[str]) -> set[str]:
    """Return names that a misspelled key could stand for, as in code and as in files."""
    aliases = {alias for alias, name in config.attribute_map.items() if name in read}
    return {name for name in read if not callable(getattr(config, name, None))} | aliases


def _describe(
    key: str, prefix: str, read: Iterable[str], raw: Mapping[str, Any], config: object = None
) -> UnreadKey:
    near = difflib.get_close_matches(key, sorted(read), n=3, cutoff=NEAREST)
    absent = [
        name
        for name in near
        if name not in raw and difflib.SequenceMatcher(None, key, name).ratio() >= MISSPELT
    ]
    # A key that the class declares is not misspelled.
    if absent and not hasattr(type(config), key):
        return UnreadKey(key=f"{prefix}{key}", problem="misspelt", nearest=absent[0])
    return UnreadKey(key=f"{prefix}{key}", nearest=near[0] if near else None)


def _is_named_by(classes: tuple[type, ...], key: str) -> bool:
    """Return True if the source of one of `classes` reads an attribute `key` or has a string `key`.

    In configuration classes of transformers an assignment counts too: the key is derived from other
    keys there, and only written to config.json.
    """
    names = {
        base.__module__
        for one in classes
        for base in one.__mro__
        if not base.__module__.startswith(_GENERAL)
    }
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return any(re.search(_pattern(key, one.__name__), _source(one)) for one in modules)


def _pattern(key: str, module: str) -> str:
    name = re.escape(key)
    own_code = module.startswith("transformers.models.")
    assigned = "" if own_code else r"(?!\s*=[^=])"
    quoted = "" if ".configuration_" in module else rf"|[\"']{name}[\"']"
    return rf"\.{name}\b{assigned}{quoted}"


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
