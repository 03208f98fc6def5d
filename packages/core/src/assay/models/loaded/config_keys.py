"""Keys of config.json that no code read, and what their effect may have been meant to be."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from assay.files import read_toml
from assay.models.loaded.config_reads import ROPE_KEYS, ConfigReads
from assay.models.loaded.config_sources import is_named_by
from assay.models.loaded.report import UnreadKey

# From this similarity on (2 x letters in common / all letters), a name is taken for another one
# misspelt: one letter too few of ten or more is above 0.9, `rope_params` for `rope_parameters` is
# 0.85; `attn_bias` beside `attention_bias` is 0.78 and may be a key of its own.
MISSPELT = 0.84

# A name is shown as the nearest from here on: difflib's own default.
NEAREST = 0.6


@cache
def inert_keys() -> Mapping[str, str]:
    """Keys that change nothing that is computed here, with the reason."""
    groups = read_toml(Path(__file__).with_name("inert_keys.toml"))
    return {key: reason for group in groups.values() for key, reason in group.items()}


@dataclass(frozen=True, slots=True)
class KeyReader:
    """Who may read a key of config.json.

    reads: what was read while the model was built and run.
    model_class: whose source may name keys that it reads in other cases only.
    """

    reads: ConfigReads
    model_class: type

    def find_unread(
        self,
        raw: Mapping[str, Any],
        config: Any,  # noqa: ANN401 - transformers
        prefix: str = "",
    ) -> tuple[list[UnreadKey], int]:
        """The keys of `raw`, a config.json as it stands, that no code reads; and how many it has.

        config: the configuration that transformers made of it.
        """
        from transformers import PretrainedConfig

        unread: list[UnreadKey] = []
        num_keys = 0
        read = self.reads.attributes.get(type(config).__name__, set())
        for key, value in raw.items():
            name = config.attribute_map.get(key, key)
            if key in inert_keys() or key.startswith("_") or value is None:
                continue
            num_keys += 1
            if not hasattr(config, name):
                # Its class took it over into something else: older names of rotary parameters.
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
        """Keys of the rotary parameters that nothing read; those for each kind of layer one by one."""
        unread = []
        for key, inner in value.items():
            if isinstance(inner, Mapping):
                within = own.get(key) if isinstance(own, Mapping) else None
                unread += self._unread_rope_keys(inner, within, f"{prefix}{key}.")
            elif key in self.reads.inner or not isinstance(own, Mapping) or key not in own:
                # Keys that are gone have an older name, and were renamed; so are names of types.
                is_number = isinstance(inner, int | float)
                if is_number and isinstance(own, Mapping) and own.get(key, inner) != inner:
                    unread.append(_overridden(f"{prefix}{key}", inner, own[key]))
            elif key in self.reads.absent:
                unread.append(UnreadKey(key=f"{prefix}{key}", problem="misplaced", nearest=key))
            else:
                unread.append(_describe(key, prefix, self.reads.inner, value))
        return unread

    def _has_no_effect(
        self,
        config: Any,  # noqa: ANN401 - transformers
        name: str,
        value: object,
    ) -> bool:
        """Whether an unread key asks for nothing but the default, or is read in other cases only."""
        if name in type(config).__dict__ and getattr(type(config), name) == value:
            return True
        names = [name, *(alias for alias, of in config.attribute_map.items() if of == name)]
        return any(is_named_by((self.model_class, type(config)), one) for one in names)


def _overridden(key: str, stored: object, used: object) -> UnreadKey:
    return UnreadKey(key=key, problem="overridden", used=repr(used), stored=repr(stored))


def _names(config: Any, read: Iterable[str]) -> set[str]:  # noqa: ANN401 - transformers
    """Names that a key of the file could have been meant for: as the code and as files have them."""
    aliases = {alias for alias, name in config.attribute_map.items() if name in read}
    return {name for name in read if not callable(getattr(config, name, None))} | aliases


def _describe(
    key: str,
    prefix: str,
    read: Iterable[str],
    raw: Mapping[str, Any],
    config: object = None,
) -> UnreadKey:
    near = difflib.get_close_matches(key, sorted(read), n=3, cutoff=NEAREST)
    absent = [
        name
        for name in near
        if name not in raw and difflib.SequenceMatcher(None, key, name).ratio() >= MISSPELT
    ]
    # What a class declares is spelt as it should be.
    if absent and not hasattr(type(config), key):
        return UnreadKey(key=f"{prefix}{key}", problem="misspelt", nearest=absent[0])
    return UnreadKey(key=f"{prefix}{key}", nearest=near[0] if near else None)
