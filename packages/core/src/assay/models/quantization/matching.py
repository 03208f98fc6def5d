"""Matching the weights of two folders by name, and by rows if several are stored as one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from assay.models.quantization.formats.protocol import Format
from assay.models.quantization.formats.registry import formats_of
from assay.models.quantization.stored import StoredWeights
from assay.sites import strip_model_prefixes

# Modules that hold the rows of several others, in this order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class Pair:
    """Weights with the same rows: one name on each side, or one name and the names of its parts."""

    expected: tuple[str, ...]
    actual: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """All pairs of two folders, and the weights without a partner."""

    pairs: tuple[Pair, ...]
    unmatched_expected: tuple[str, ...]
    unmatched_actual: tuple[str, ...]


def list_weights(stored: StoredWeights) -> dict[str, Format | None]:
    """Return every weight, once, with the format of the quantized ones."""
    found: dict[str, Format | None] = {}
    parts: set[str] = set()
    for one in formats_of(stored):
        for name in stored.shapes:
            module = name.removesuffix(f".{one.marker}")
            if module != name:
                found[f"{module}.weight"] = one
                parts |= {f"{module}.{part}" for part in one.parts}
    return found | {name: None for name in stored.shapes if name not in parts}


def match_weights(expected: Iterable[str], actual: Iterable[str]) -> Pairs:
    """Match names, without prefixes that implementations add, and fused weights with their parts."""
    of_expected = {strip_model_prefixes(name): name for name in expected}
    of_actual = {strip_model_prefixes(name): name for name in actual}
    pairs = [
        Pair((name,), (of_actual[key],)) for key, name in of_expected.items() if key in of_actual
    ]
    left = {key: name for key, name in of_expected.items() if key not in of_actual}
    others = {key: name for key, name in of_actual.items() if key not in of_expected}
    pairs += [Pair(parts, (whole,)) for whole, parts in _take_fused(others, left)]
    pairs += [Pair((whole,), parts) for whole, parts in _take_fused(left, others)]
    return Pairs(tuple(pairs), tuple(left.values()), tuple(others.values()))


def _take_fused(wholes: dict[str, str], parts: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Remove fused weights and their parts from what is left, and return them."""
    found = []
    for key in list(wholes):
        module, _, kind = key.rpartition(".")
        parent, _, last = module.rpartition(".")
        keys = [f"{parent}.{name}.{kind}" for name in _FUSED.get(last, ())]
        if keys and all(one in parts for one in keys):
            found.append((wholes.pop(key), tuple(parts.pop(one) for one in keys)))
    return found


def count_groups(stored: StoredWeights, weights: Mapping[str, Format | None]) -> int:
    """Return the number of scales of all quantized weights, without reading them."""
    return sum(
        prod(stored.shapes.get(f"{name.removesuffix('weight')}{one.scales}", ()))
        for name, one in weights.items()
        if one is not None
    )
