"""Differences between two machines, models and inputs, in words. Imports no torch."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from assay.errors import name_some
from assay.judge.wording import format_count
from assay.models.config_files import list_changes
from assay_expectations.records import Content, Machine, Weight


def machine_differences(expected: Machine, actual: Machine) -> list[str]:
    """List the differences between two machines."""
    return list_changes(expected.model_dump(), actual.model_dump())


# Token ids of the user's own prompts; empty for built-in ones.
Prompts = Sequence[Sequence[int]]


def content_differences(
    expected: Content,
    actual: Content,
    prompts: tuple[Prompts, Prompts] = ((), ()),
    built_in: str = "",
) -> list[str]:
    """List the differences in content, one line per kind.

    prompts: of both sides. built_in: words for other built-in ones, from `describe_built_in`.
    """
    found = weight_differences(expected.weights, actual.weights)
    if expected.tokenizer_hash != actual.tokenizer_hash:
        found += _tokenizer_differences(expected.tokenizer, actual.tokenizer)
    settings = list_changes(expected.settings.model_dump(), actual.settings.model_dump())
    has_both = bool(expected.unpadded_hash and actual.unpadded_hash)
    name = "unpadded_hash" if has_both else "prompts_hash"
    if getattr(expected, name) != getattr(actual, name):
        different = describe_prompts(*prompts)
        if different or not settings:  # other settings choose or cut the same prompts
            whose = "the same prompts" if prompts[0] else "built-in prompts"
            found.append(different or built_in or f"{whose} with other token ids or padding")
    return found + settings


def _tokenizer_differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Name missing files and changed parts."""
    if not expected:
        return ["different tokenizer"]
    missing = missing_tokenizer_files(expected, actual)
    changed = [
        name
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name) and name.partition(":")[0] not in missing
    ]
    found = [f"missing tokenizer files: {name_some(missing)}"] if missing else []
    if changed:
        found.append(f"different tokenizer: {name_some(changed)}")
    return found


def missing_tokenizer_files(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """List the files of which `actual` has no part."""
    then, now = ({name.partition(":")[0] for name in parts} for parts in (expected, actual))
    return sorted(then - now)


def describe_prompts(expected: Prompts, actual: Prompts) -> str:
    """Name the first different prompt and token; "" if the user's own are equal, or both sides have the built-in ones."""
    counts = [
        format_count(len(one), "own prompt") if one else "built-in prompts"
        for one in (expected, actual)
    ]
    if not (expected and actual):
        return "" if expected == actual else f"different prompts: {counts[0]} → {counts[1]}"
    pairs: list[tuple[Sequence[int], ...]] = [*zip_longest(expected, actual, fillvalue=())]
    different = [number for number, (then, now) in enumerate(pairs) if [*then] != [*now]]
    if not different:
        return ""
    length = f" ({counts[0]} → {counts[1]})" if len(expected) != len(actual) else ""
    tokens = enumerate(zip_longest(*pairs[different[0]], fillvalue="none"))
    place, (old, new) = next((place, ids) for place, ids in tokens if ids[0] != ids[1])
    return (
        f"different prompts: {len(different)} of {len(pairs)}{length}, the first is prompt {different[0]} at its token"
        f" {place} (both counted from 0): id {old} → {new}"
    )


# Keys of config.json that size the built-in prompts.
_SIZES = re.compile(
    r"config\.json: \S*(max_position_embeddings|max_seq_len|n_positions|sliding_window|layer_types)\b"
)


def describe_built_in(expected: Prompts, actual: Prompts, config: Sequence[str]) -> str:
    """Name the first different built-in prompt; "" for equal ones, or without a record.

    config: changes of config.json, of which those that size the prompts are named.
    """
    different = describe_prompts(expected, actual) if expected and actual else ""
    keys = "; ".join(filter(_SIZES.match, config))
    because = f", because of {keys}" if keys else ""
    return different and different.replace(" prompts", " built-in prompts", 1) + because


def has_same_inputs(expected: Content, actual: Content) -> bool:
    """Return True if both run the same tokens: weights of the same shapes, besides added ones, or tokenizers differ."""
    then, now = (
        Counter(tuple(one.shape) for one in content.weights.values())
        for content in (expected, actual)
    )
    same = {"weights": expected.weights, "tokenizer_hash": expected.tokenizer_hash}
    is_same = not content_differences(expected, actual.model_copy(update=same))
    return is_same and (then <= now or now <= then)


def weight_differences(expected: Mapping[str, Weight], actual: Mapping[str, Weight]) -> list[str]:
    """List the differences between checkpoints, one line per kind."""
    missing = {name: expected[name] for name in sorted(expected.keys() - actual.keys())}
    new = {name: actual[name] for name in sorted(actual.keys() - expected.keys())}
    renamed: list[str] = []
    for name in list(missing):
        other = next((one for one in new if new[one] == missing[name]), None)
        if other is not None:
            renamed.append(f"{name} is now {other}")
            del missing[name], new[other]
    formats: dict[str, list[str]] = {}
    values = []
    for name in sorted(expected.keys() & actual.keys()):
        before, now = expected[name], actual[name]
        if (before.dtype, before.shape) != (now.dtype, now.shape):
            shapes = [f" {one.shape}" if before.shape != now.shape else "" for one in (now, before)]
            change = f"{now.dtype}{shapes[0]}, expected {before.dtype}{shapes[1]}"
            formats.setdefault(change, []).append(name)
        elif before != now:
            values.append(name)
    kinds_of_format = [
        f"{name_some(names, 1)} {'are' if len(names) > 1 else 'is'} {change}"
        for change, names in formats.items()
    ]
    num_formats = sum(map(len, formats.values()))
    kinds = [
        (renamed, f"renamed weights ({len(renamed)})"),
        (list(missing), f"missing weights ({len(missing)})"),
        (list(new), f"new weights ({len(new)})"),
        (kinds_of_format, f"weights with a different dtype or shape ({num_formats})"),
        (values, f"weights with different values ({len(values)} of {len(expected)})"),
    ]
    return [f"{kind}: {name_some(names)}" for names, kind in kinds if names]
