"""Caches of transformers: the one place that knows which classes there are and what their layers hold.

A cache holds *parts*, such as the keys of a layer. Most have an axis of tokens, to which each call appends.
Others are states: a convolution's last inputs or the state of a recurrence, which each call replaces.

| class (transformers 5.23) | parts |
|---|---|
| layers that derive from `DynamicLayer` or `StaticLayer` | keys, values, keys of an indexer |
| layers that derive from `LinearAttentionLayer`, also with keys and values | convolution, recurrent states |
| layers of DeepSeek V4 | keys; buffered, compressed and overlapping entries, which are states |
| `Cache` and its subclasses, `EncoderDecoderCache` | those of their layers; of `MiniMaxCache` linear states too |
| `xLSTMCache` | recurrent states |

Other containers of tensors that a module takes, such as lists of states (RWKV, XLNet) and tuples of tuples, are
plain arguments. A cache of any other class, or that holds a tensor under an unknown name, is refused by name.
A model with its own classes of caches and layers declares their tensors in class attributes: `assay_tokens`
names those with an axis of tokens, the second last, and `assay_states` the states. Either may be empty.
Quantized layers are refused: a value that a replay writes back would be quantized once more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as memoized
from operator import is_
from typing import Any, Literal, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from assay.hooks.tensors import iterate_leaves, iterate_tensors
from assay.models.weight_files import hash_tensor

# Names of what models take and return as their cache.
_NAMES = ("past_key_values", "cache_params", "state")

# Ports of what a call adds, and of the tokens that it must not change, begin with these.
CHANGED, KEPT = "changed.", "kept."

# Attributes with parts whose second last axis has the tokens, and counters of the tokens that were written.
# Without a counter, all columns hold tokens.
_TOKENS: Mapping[str, tuple[str, ...]] = {
    "keys": ("cumulative_length_int", "cumulative_length"),
    "values": ("cumulative_length_int", "cumulative_length"),
    "indexer_keys": ("indexer_cumulative_length",),
    "idx_keys": ("idx_cumulative_length",),
    "prefill_keys": (),
    "prefill_values": (),
}
# Attributes with states: tensors, or lists, tuples and dictionaries of them. The first axis has the rows.
_STATES = (
    "conv_states", "recurrent_states", "linear_cache", "rnn_state", "buffer_kv", "buffer_gate",
    "compressed_kv", "overlap_kv", "overlap_gate",
)  # fmt: skip
# Tensors that count tokens, or hold positions: those are inputs of the model, and compared there.
_COUNTERS = frozenset({
    "_sliding_window_tensor", "indexer_position_ids", "seqlen_offset",
    *(name for names in _TOKENS.values() for name in names),
})  # fmt: skip

# Classes of transformers. Their subclasses are read unless they hold tensors under other names.
_KNOWN = frozenset({
    "Cache", "xLSTMCache", "DynamicLayer", "StaticLayer", "LinearAttentionLayer", "DummyLayer",
})  # fmt: skip

# Attributes by which the class of another library declares its parts.
_DECLARED = ("assay_tokens", "assay_states")

# The caches of an `EncoderDecoderCache`.
_OF_A_PAIR = ("self_attention_cache", "cross_attention_cache")

# Elements of a state that are compared in inference mode, in which torch does not count changes.
_SAMPLED = 64


class _Names(NamedTuple):
    """The attributes of a class that hold parts."""

    tokens: Mapping[str, tuple[str, ...]]
    """With an axis of tokens, each with its counters."""
    states: tuple[str, ...]


def _names_of(holder: object) -> _Names:
    kind: Any = type(holder)
    return _names_in(kind)


@memoized
def _names_in(kind: type) -> _Names:
    tokens, states = (getattr(kind, name, ()) for name in _DECLARED)
    return _Names({**_TOKENS, **dict.fromkeys(tokens, ())}, (*_STATES, *states))


@memoized
def _standing(kind: type) -> Literal["known", "unknown"] | None:
    """Return the standing of a class of caches or layers, known or unknown; None for other classes."""
    if issubclass(kind, Tensor | nn.Module | Mapping | Sequence | type):
        return None
    if any(hasattr(kind, name) for name in _DECLARED):
        return "known"
    for one in kind.__mro__:
        if one.__name__ in _KNOWN and one.__module__.startswith("transformers."):
            return "known"
    is_cache = hasattr(kind, "get_seq_length") or "Cache" in kind.__name__
    return "unknown" if is_cache else None


def _is_known(value: object) -> bool:
    kind: Any = type(value)
    return _standing(kind) == "known"


def is_cache(value: object) -> bool:
    """Return True for a cache, also of an unknown class."""
    kind: Any = type(value)
    return _standing(kind) is not None


def count_tokens(cache: Any) -> int | None:  # noqa: ANN401 - of transformers
    """Return the number of tokens that a cache holds, 0 for None.

    Returns: None if unknown, as for linear layers alone, and for other objects.
    """
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length()) if is_cache(cache) else None
    except Exception:  # noqa: BLE001 - an unknown class raises anything
        return None


def passed_on(output: object) -> dict[str, Any]:
    """Return the caches in the output of a model, by the names of the arguments of its next call."""
    found = {name: getattr(output, name, None) for name in _NAMES}
    return {name: value for name, value in found.items() if value is not None}


# transformers 5.24 calls the argument `cache`, earlier versions `past_key_values`, and most layers of 4.x
# `past_key_value`.
_CACHE = "past_key_values"
_CACHE_ARGUMENTS = (_CACHE, "cache", "past_key_value")


def cache_of(arguments: Mapping[str, Any]) -> object:
    """Return the cache that a model is called with; None without one."""
    given = (arguments[name] for name in _CACHE_ARGUMENTS if name in arguments)
    return next((one for one in given if one is not None), None)


def find_caches(arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return all caches among the arguments, alone or in lists, tuples and dictionaries, with their ports.

    A port has one name in all versions of a library, so that its values are compared across them.
    """
    found = []
    for argument, value in arguments.items():
        name = _CACHE if argument in _CACHE_ARGUMENTS else argument
        if is_cache(value):
            found.append((name, value))
        elif isinstance(value, list | tuple | dict):
            found += [leaf for leaf in iterate_leaves(value, name) if is_cache(leaf[1])]
    return found


class Part(NamedTuple):
    """A tensor of a cache."""

    name: str
    """Name in its layer: `keys`, `recurrent_states.0`."""
    tensor: Tensor
    """(B, ...); with tokens, (..., tokens, C)."""
    length: int | None
    """Number of tokens written so far, which may exceed the columns of a window; None for a state."""


def list_parts(cache: object) -> list[Part]:
    """Return the parts of a cache that hold any values; none for an unknown class."""
    return [part for _, holder in _holders(cache) for part in _parts_of(holder)]


def _holders(cache: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - of transformers
    """Yield a cache and its layers, which hold the parts, with their paths."""
    if not _is_known(cache):
        return
    yield path, cache
    for index, layer in enumerate(getattr(cache, "layers", ())):
        yield f"{path}{index}.", layer
    for name in _OF_A_PAIR:
        yield from _holders(getattr(cache, name, None), f"{path}{name}.")


def _caches_in(cache: object) -> list[object]:
    """Return a cache, or the two of an `EncoderDecoderCache`."""
    return [getattr(cache, name) for name in _OF_A_PAIR if hasattr(cache, name)] or [cache]


def _parts_of(holder: object) -> Iterator[Part]:
    values, names = vars(holder), _names_of(holder)
    for name, counters in names.tokens.items():
        tensor = values.get(name)
        if isinstance(tensor, Tensor) and tensor.ndim > 2 and tensor.numel():
            count = next((values[one] for one in counters if one in values), tensor.shape[-2])
            yield Part(name, tensor, int(count))
    for name in filter(values.__contains__, names.states):
        for port, tensor in iterate_tensors(values[name], name):
            if tensor.numel():
                yield Part(port, tensor, None)


def find_unreadable(cache: object) -> list[str]:
    """Return the classes, of a cache and its layers, whose parts are unknown, with the unknown names."""
    if not _is_known(cache):
        return [type(cache).__name__]
    unknown = {
        type(one).__name__: _unknown_names(one)
        for _, one in _holders(cache)
        if not _is_known(one) or _unknown_names(one)
    }
    return sorted(f"{name} ({', '.join(held)})" if held else name for name, held in unknown.items())


def _unknown_names(holder: object) -> list[str]:
    names = _names_of(holder)
    return [
        name
        for name, value in vars(holder).items()
        if not (name in names.tokens or name in names.states or name in _COUNTERS)
        and any(iterate_tensors(value, name))
    ]


@dataclass(slots=True)
class Addition:
    """The tokens that one call added to a part of a cache, or a state that it replaced."""

    port: str
    tensor: Tensor
    """A view of the cache, (..., tokens, C), or a state (B, ...): writing to it changes the cache."""
    has_tokens: bool
    """True if its tokens are those of the call. A state has none, and a cache of cross-attention others."""
    history_changed: bool | None
    """True if earlier tokens changed since the last addition; None if unknown, as in a buffer, and for a state."""
    history: tuple[Tensor, Tensor] | None = None
    """The earlier tokens after the call and before it, if they are compared; their port begins with `KEPT`."""


class _Place(NamedTuple):
    """The place of a part, or of a list or tuple of states, in a cache."""

    container: Any
    key: Any
    path: str
    """Path of the layer in the cache, such as `3.`."""
    holder: Any
    """The layer, or the cache itself."""
    name: str
    """Name of the part, or the start of those in a list or tuple."""

    def mark(self, tensor: object) -> object:
        """Return a value that differs once a tensor has changed in inference mode, without versions."""
        if not isinstance(tensor, Tensor):
            return None
        counters = _TOKENS.get(self.name)
        if counters is not None:
            return [int(self.container[one]) for one in counters if one in self.container]
        if self.name in _names_of(self.holder).tokens:  # a class of its own may write any column
            return hash_tensor(tensor)
        values = tensor.reshape(-1)
        return values[:: max(1, len(values) // _SAMPLED)].tolist()


def _find_places(cache: object) -> list[_Place]:
    found = []
    for path, holder in _holders(cache):
        values, names = vars(holder), _names_of(holder)
        for name in (*names.tokens, *names.states):
            value = values.get(name)
            if isinstance(value, dict):
                found += [_Place(value, key, path, holder, f"{name}.{key}") for key in value]
            elif name in values:
                found.append(_Place(values, name, path, holder, name))
    return found


class _Stamp(NamedTuple):
    """The values of a cache at one time, and marks that change when a value is written in place."""

    values: list[Any]
    marks: list[object]

    @classmethod
    def of(cls, places: Sequence[_Place]) -> Self:
        """Stamp a cache. This runs at every call of a module that gets the cache, for all layers."""
        values = [container[key] for container, key, *_ in places]
        try:
            marks: list[object] = [
                value._version if value.__class__ is Tensor else _versions(value)  # noqa: SLF001 - no public name
                for value in values
            ]
        except RuntimeError:  # a tensor of inference mode
            marks = [place.mark(value) for place, value in zip(places, values, strict=True)]
        return cls(values, marks)

    def changed(self, later: Self) -> list[int]:
        """Return the numbers of the places that have changed."""
        if self.marks == later.marks and all(map(is_, self.values, later.values)):
            return []
        pairs = enumerate(zip(self.values, later.values, strict=True))
        return [n for n, (a, b) in pairs if a is not b or self.marks[n] != later.marks[n]]


def _versions(value: object) -> object:
    if value is None:
        return None
    tensors = [tensor for _, tensor in iterate_tensors(value, "")]
    return [(id(one), one._version) for one in tensors]  # noqa: SLF001 - no public name


@dataclass(slots=True)
class CacheBefore:
    """A cache among the arguments of a call, before the call."""

    name: str
    """Name of the argument, and the path in it."""
    cache: Any
    places: list[_Place]
    stamp: _Stamp


class _Left(NamedTuple):
    """A part with tokens, as the call left it that added to it last."""

    tensor: "ref[Tensor]"
    version: int
    length: int

    def is_written(self, part: Part) -> bool:
        """Return True if something has written to the same tensor since."""
        is_same = self.tensor() is part.tensor and self.length == part.length
        return is_same and self.version != part.tensor._version  # noqa: SLF001 - no public name


@dataclass
class CacheTracker:
    """Finds the calls that change a cache, and what they add.

    A snapshot of the values at every step would cost the square of the length. Earlier steps added the
    other tokens; a check shows that they are unchanged.
    """

    _claimed: set[tuple[int, str]] = field(default_factory=set)
    """Parts by identity of the layer and name."""
    _seen: dict[int, tuple[str, Any, int, list[_Place]]] = field(default_factory=dict)
    """The caches of the root call by identity, each with its port, number of layers and places."""
    _parts: dict[tuple[int, str], Part] = field(default_factory=dict)
    """Parts before the root call."""
    _left: dict[tuple[int, str], _Left] = field(default_factory=dict)
    """Parts after the last call that added to them."""
    _written: set[tuple[int, str]] = field(default_factory=set)
    """Parts that something has written to between two root calls."""

    def begin_root(self) -> None:
        """Forget the additions of the last root call."""
        self._claimed.clear()
        self._seen.clear()
        self._parts.clear()
        self._written.clear()
        self._left = {key: one for key, one in self._left.items() if one.tensor() is not None}

    def snapshot(self, arguments: Mapping[str, Any]) -> list[CacheBefore]:
        """Return all caches among `arguments`, before a call."""
        found = []
        for port, cache in find_caches(arguments):
            if id(cache) not in self._seen:
                for _, one in _holders(cache):
                    parts = {(id(one), part.name): part for part in _parts_of(one)}
                    self._parts |= parts
                    self._written |= {
                        key for key, part in parts.items() if self._is_written(key, part)
                    }
            places = self._find_places(port, cache)
            found.append(CacheBefore(port, cache, places, _Stamp.of(places)))
        return found

    def additions(self, caches: Sequence[CacheBefore]) -> Iterator[Addition]:
        """Yield the additions of a call that ends, without those of its callees."""
        for one in caches:
            if getattr(one.cache, "offloading", False) and torch.accelerator.is_available():
                torch.get_device_module().synchronize()  # copies to the host may still run
            places = self._find_places(one.name, one.cache)
            changed = [one.places[n] for n in one.stamp.changed(_Stamp.of(one.places))]
            if places is not one.places:  # the call has added layers
                known_ids = {id(place.holder) for place in one.places}
                changed += [place for place in places if id(place.holder) not in known_ids]
            for place in changed:
                if (id(place.holder), place.name) in self._claimed:
                    continue
                for part in _parts_of(place.holder):
                    key = id(place.holder), part.name
                    is_here = f"{part.name}.".startswith(f"{place.name}.")
                    known = self._parts.get(key)
                    if is_here and key not in self._claimed and not _is_moved(part, known):
                        self._claimed.add(key)
                        port = f"{CHANGED}{one.name}.{place.path}{part.name}"
                        addition = _addition(port, part, known)
                        is_copy = known is not None and known.tensor is not part.tensor
                        if key in self._written or (is_copy and self._is_written(key, known)):
                            addition.history_changed = True
                        yield addition
                        self._keep(key, part)  # with the values that the caller wrote

    def _keep(self, key: tuple[int, str], part: Part) -> None:
        """Keep the version of a part with tokens. A tensor of inference mode has none."""
        if part.length is not None and not part.tensor.is_inference():
            version = part.tensor._version  # noqa: SLF001 - no public name
            self._left[key] = _Left(ref(part.tensor), version, part.length)

    def _is_written(self, key: tuple[int, str], part: Part | None) -> bool:
        left = self._left.get(key)
        return left is not None and part is not None and left.is_written(part)

    def find_unreadable(self) -> list[str]:
        """Return the caches of the root call that cannot be read, each with its port and class."""
        return [
            f"{port}, as assay cannot read {name}"
            for port, cache, *_ in self._seen.values()
            for name in find_unreadable(cache)
        ]

    def _find_places(self, port: str, cache: object) -> list[_Place]:
        num_layers = sum(len(getattr(one, "layers", ())) for one in _caches_in(cache))
        known = self._seen.get(id(cache))
        if known is None or known[2] != num_layers:
            known = self._seen[id(cache)] = port, cache, num_layers, _find_places(cache)
        return known[3]


def _is_moved(part: Part, before: Part | None) -> bool:
    """Return True for a part of an offloaded layer that was fetched: other tensors with the same values."""
    return (
        before is not None
        and part.length == before.length
        and part.tensor is not before.tensor
        and torch.equal(part.tensor.cpu(), before.tensor.cpu())
    )


def _addition(port: str, part: Part, before: Part | None) -> Addition:
    tensor = part.tensor
    if part.length is None:
        return Addition(port, tensor[...], has_tokens=False, history_changed=None)
    known = before.length if before is not None and before.length is not None else 0
    stop = min(part.length, tensor.shape[-2])
    count = min(part.length - known, stop) if part.length > known else stop
    added, kept = tensor[..., stop - count : stop, :], stop - count
    changed: bool | None = False
    history = None
    if before is not None and part.length <= known:
        changed = True
    elif before is not None and before.tensor is tensor:
        changed = None
    elif before is not None and kept:
        previous = before.tensor.to(tensor.device)
        history = tensor[..., :kept, :], previous[..., previous.shape[-2] - kept :, :]
        changed = not torch.equal(*history)
    is_own = f".{_OF_A_PAIR[1]}." not in port
    return Addition(port, added, has_tokens=is_own, history_changed=changed, history=history)
