"""Numbering of calls: from a tool's call counters to forward passes and calls within a pass."""

from collections import Counter
from collections.abc import Iterable, Mapping


def count_passes(calls: Iterable[int]) -> int:
    """Return the number of passes, from the number of calls of each module.

    Most modules run once in a pass, so it is the most common number.
    """
    counts = Counter(calls)
    return max(counts, key=lambda number: (counts[number], number), default=0)


def split_call(call: int, num_calls: int, num_passes: int) -> tuple[int, int]:
    """Return the pass of a module's call, and its number within the pass.

    >>> split_call(5, num_calls=6, num_passes=3)  # a module that is called twice in each pass
    (2, 1)
    """
    in_each_pass, rest = divmod(num_calls, num_passes) if num_passes else (0, 1)
    return divmod(call, in_each_pass) if in_each_pass and not rest else (call, 0)


def number_ports(values: Mapping[str, object]) -> dict[str, str]:
    """Return the port of each output: a single one has no number.

    >>> number_ports({"0": ...})
    {'0': 'output'}
    """
    single = len(values) == 1
    return {name: "output" if single else f"output.{name}" for name in values}
