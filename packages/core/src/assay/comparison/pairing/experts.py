"""Experts of a token: choices that differ at a near tie of router scores, and rows inside fused experts.

A token that goes to another expert has other values from there on, and later tokens attend to it. A choice
that differs at a near tie is not an error. Implementations order the rows inside fused experts differently.
The recorded router choices identify token and expert of each row.

Shape legend: N tokens of a pass, K experts of a token, C channels, R paired tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, prod

import torch
from torch import Tensor

from assay.comparison.pairing.matching import Matching
from assay.comparison.pairing.passes import Pass, PassPair, take_rows
from assay.comparison.pairing.port_series import ROUTERS, Port, Series, SeriesPair, read_shared
from assay.dumps.protocol import DumpedTensor
from assay.replay.routing import find_choice, may_be_routing, near_tie_rows

# Returns the expected root mean square error of router scores, from their port and values.
ScoreNoise = Callable[[Port, Tensor], float]


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that a router sent to other experts at a near tie."""

    order: int
    """Position of the router in the network."""
    module: str
    prompt: int
    position: int


def find_flips(
    pairs: Sequence[SeriesPair], passes: Sequence[PassPair], score_noise: ScoreNoise
) -> list[Flip]:
    """Return the near-tie flips of all routers in network order."""
    routers: dict[str, dict[str, SeriesPair]] = {}
    for matched in pairs:
        if matched.port.direction == "output" and matched.port.phase == "forward":
            routers.setdefault(matched.port.module, {})[matched.port.name] = matched
    found: list[Flip] = []
    for matched_of in routers.values():
        dtypes = {
            matched.expected.first.dtype.startswith(("int", "uint"))
            for matched in matched_of.values()
        }
        if dtypes == {True, False}:
            for pair in passes:
                found += _find_in_pass(matched_of, pair.by_row(), score_noise)
    return sorted(found, key=lambda flip: flip.order)


def _find_in_pass(
    matched_of: Mapping[str, SeriesPair], pair: PassPair, score_noise: ScoreNoise
) -> Iterator[Flip]:
    values: dict[str, Tensor] = {}
    references: dict[str, Tensor] = {}
    for name, matched in matched_of.items():
        ours = _rows_of(matched.actual, pair.actual, pair.actual_rows)
        theirs = _rows_of(matched.expected, pair.expected, pair.expected_rows)
        if ours is not None and theirs is not None:
            values[name], references[name] = ours, theirs
    if not may_be_routing(references) or pair.rows is None:
        return
    choice = find_choice(values, references)
    if choice is None:
        return
    of_indices, of_scores = choice
    scores = references[of_scores]
    error = score_noise(matched_of[of_scores].port, scores)
    flipped = near_tie_rows(values[of_indices], references[of_indices], scores, error)
    series = matched_of[of_indices].expected
    for number in flipped.nonzero()[:, 0].tolist():
        prompt, position = pair.rows.prompts[number], pair.rows.positions[number][0]
        if position >= 0:
            yield Flip(series.order, series.port.module, prompt, position)


def _rows_of(series: Series, of_pass: Pass, numbers: Tensor | None) -> Tensor | None:
    """Return the rows of the paired tokens, (R, C); None unless all ranks hold the same ones."""
    values = read_shared(series.held_in(of_pass))
    taken = take_rows(values, of_pass, numbers) if values is not None else None
    return taken[0][:, 0] if taken is not None and bool(taken[1].all()) else None


# Rows of the same token differ by less than half of their norm, rows of different tokens by more.
_SIMILAR = 0.5
# Sums of equal errors may differ in their last digits.
_CLEARLY = 1e-3

_Key = tuple[int, int]  # batch and step


def place_expert_rows(
    matching: Matching, passes: Sequence[PassPair], first_different: Mapping[int, int]
) -> None:
    """Reorder the rows inside fused experts to shape (N, K, C), in the series of `matching`.

    If all routers agree, rows that already correspond stay unchanged. Ports whose rows have no known token
    become unmatched.
    first_different: position of the first different token by prompt.
    """
    alike = [_find_comparable(pair, first_different) for pair in passes]
    for choices, inner in _find_fused(matching.pairs):
        layer = _Layer(
            _Experts(choices.expected if choices else None, [x.expected for x in inner]),
            _Experts(choices.actual if choices else None, [x.actual for x in inner]),
        )
        alike = list(map(layer.compare_choices, passes, alike))
        keeps = all(bool(one.all()) for one in alike)
        if all(layer.choose_orders(*one, keeps=keeps) for one in zip(passes, alike, strict=True)):
            layer.expected.place()
            layer.actual.place()
            continue
        for matched in inner:
            matching.pairs.remove(matched)
            matching.unmatched_expected.append(
                f"{matched.port}: the recorded expert choices do not tell the tokens of its rows"
            )


def _find_comparable(pair: PassPair, first_different: Mapping[int, int]) -> Tensor:
    """Return which paired tokens precede the first different token, (R,)."""
    rows = pair.by_row().rows
    places = zip(rows.prompts, rows.positions, strict=True) if rows is not None else ()
    return torch.tensor([at < first_different.get(prompt, inf) for prompt, (at,) in places])


def _find_fused(
    pairs: Sequence[SeriesPair],
) -> Iterator[tuple[SeriesPair | None, list[SeriesPair]]]:
    """Yield the ports of each module inside fused experts, with the recorded router choices."""
    choices: dict[str, SeriesPair] = {}
    inner: dict[str, list[SeriesPair]] = {}
    for pair in pairs:
        port, first = pair.port, pair.expected.first
        parent, _, name = port.module.rpartition(".")
        if port.phase != "forward" or port.direction not in ("input", "output"):
            continue
        if "int" in first.dtype and len(first.shape or ()) > 1:
            if port.direction == "input":
                choices[port.module] = pair
            elif name in ROUTERS:
                choices.setdefault(f"{parent}.experts", pair)
        elif parent.split(".")[-1] == "experts" and not name.isdigit() and _are_matrices(pair):
            inner.setdefault(port.module, []).append(pair)
    for module, found in inner.items():
        yield choices.get(module.rpartition(".")[0]), found


def _are_matrices(pair: SeriesPair) -> bool:
    sides = (*pair.expected.tensors.values(), *pair.actual.tensors.values())
    tensors = [tensor for held in sides for tensor in held]
    return all(one.has_values and not one.layout and len(one.shape or ()) == 2 for one in tensors)


def _read_rows(parts: Sequence[DumpedTensor], order_NK: Tensor) -> Tensor:
    return torch.cat([one.read() for one in parts])[order_NK]


@dataclass(frozen=True, slots=True)
class _Experts:
    """A module inside the fused experts of one dump."""

    choices: Series | None
    all_series: Sequence[Series]
    orders: dict[_Key, Tensor] = field(default_factory=dict)
    """The row of each token and expert among the rows of all calls, (N, K), by batch and step."""

    def read_choices(self, of_pass: Pass) -> Tensor | None:
        """Return the experts of each token, (N, K); None if unknown or if ranks differ."""
        choices = read_shared(self.choices.held_in(of_pass)) if self.choices else None
        if choices is None:
            return None
        choice_NK = choices.flatten(0, -2).long()
        fits = of_pass.shape is not None and len(choice_NK) == prod(of_pass.shape)
        return choice_NK if fits and bool((choice_NK >= 0).all()) else None

    def read_rows(self, of_pass: Pass) -> Tensor | None:
        """Return the rows of all calls at the first port and rank; None if a file is damaged."""
        found = [
            held[0].read_intact() for held in _calls_of(self.all_series[0], _key(of_pass)).values()
        ]
        intact = [one for one in found if one is not None]
        return torch.cat(intact) if intact and len(intact) == len(found) else None

    def list_lengths(self, of_pass: Pass) -> set[tuple[int, ...]]:
        """Return the numbers of rows in all calls; several if ports or ranks differ."""
        return {
            tuple(tensor.shape[0] for tensor in tensors if tensor.shape)
            for series in self.all_series
            for tensors in zip(*_calls_of(series, _key(of_pass)).values(), strict=False)
        }

    def list_orders(self, of_pass: Pass) -> list[Tensor]:
        """Return the possible orders of a pass, the most common one first."""
        choice_NK = self.read_choices(of_pass)
        if choice_NK is None:
            return []
        known = self.orders.get(_key(of_pass))
        return [known] if known is not None else _list_orders(choice_NK, self.list_lengths(of_pass))

    def place(self) -> None:
        """Merge the calls of each pass with a known order into one."""
        for series in self.all_series:
            for key, order_NK in self.orders.items():
                calls = _calls_of(series, key)
                placed = []
                for parts in map(list, zip(*calls.values(), strict=True)):
                    shape = (*order_NK.shape, *(parts[0].shape or ())[1:])
                    name, load = f"{parts[0].key} (by token)", partial(_read_rows, parts, order_NK)
                    placed.append(replace(parts[0], key=name, load=load, shape=shape))
                for at in calls:
                    del series.tensors[at]
                series.tensors[*key, 0] = placed


def _key(of_pass: Pass) -> _Key:
    return of_pass.batch, of_pass.step


def _calls_of(series: Series, key: _Key) -> dict[tuple[int, int, int], list[DumpedTensor]]:
    return {at: tensors for at, tensors in sorted(series.tensors.items()) if at[:2] == key}


def _list_orders(choice_NK: Tensor, lengths: set[tuple[int, ...]]) -> list[Tensor]:
    """Return possible orders, with the experts of a token ascending. lengths: rows of each call."""
    num_tokens, num_chosen = choice_NK.shape
    chosen = choice_NK.flatten()
    counts = chosen.bincount()
    slots: list[Tensor] = []
    # Source: transformers 5, integrations/moe.py and models/mixtral/modeling_mixtral.py.
    if lengths == {(len(chosen),)}:
        # grouped_mm sorts by expert, on CPUs not stably; batched_mm does not sort.
        slots = [chosen.argsort(stable=True), chosen.argsort(), torch.arange(len(chosen))]
    elif lengths == {tuple(counts[counts > 0].tolist())}:
        # eager calls one expert after the other, with all first choices before all second ones.
        by_choice = choice_NK * num_chosen + torch.arange(num_chosen)
        slots = [by_choice.flatten().argsort(stable=True)]
    ascending = choice_NK.argsort(dim=1, stable=True)
    wanted = torch.arange(num_tokens)[:, None] * num_chosen + ascending
    return [one.argsort()[wanted] for one in slots]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module inside fused experts, on both sides."""

    expected: _Experts
    actual: _Experts

    def compare_choices(self, pair: PassPair, alike: Tensor) -> Tensor:
        """Return which tokens of `alike` have the same experts in the same order, (R,)."""
        choices = self.expected.read_choices(pair.expected), self.actual.read_choices(pair.actual)
        if choices[0] is None or choices[1] is None:
            return alike
        taken = _take_both(pair, choices[0], choices[1])
        return alike & (taken[0] == taken[1]).all(1) if taken is not None else alike

    def choose_orders(self, pair: PassPair, alike: Tensor, *, keeps: bool) -> bool:
        """Store the orders for which tokens agree best, unless rows already correspond.

        alike: tokens that must agree.
        Returns: False if they agree in no order.
        """
        reference = self.expected.read_rows(pair.expected)
        value = self.actual.read_rows(pair.actual)
        if reference is None or value is None:
            return True  # the comparison reports the missing partner or the damaged file
        orders = self.expected.list_orders(pair.expected), self.actual.list_orders(pair.actual)
        lengths = self.actual.list_lengths(pair.actual)
        is_same = pair.expected_rows is None and lengths == self.expected.list_lengths(
            pair.expected
        )
        if is_same and keeps and (not all(orders) or _difference(reference, value) <= _SIMILAR):
            return True
        least = inf
        for expected, actual in product(*orders):
            taken = _take_both(pair, reference[expected], value[actual])
            error = inf if taken is None else _difference(taken[0][alike], taken[1][alike])
            if error <= _SIMILAR and error < least - _CLEARLY:
                least = error
                self.expected.orders[_key(pair.expected)] = expected
                self.actual.orders[_key(pair.actual)] = actual
        return least < inf


def _take_both(pair: PassPair, reference: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows of the paired tokens, (R, C), as wide as the narrower side."""
    pair, width = pair.by_row(), min(reference.shape[-1], value.shape[-1])
    one = take_rows(reference[..., :width], pair.expected, pair.expected_rows)
    other = take_rows(value[..., :width], pair.actual, pair.actual_rows)
    return (one[0][:, 0], other[0][:, 0]) if one is not None and other is not None else None


def _difference(reference: Tensor, value: Tensor) -> float:
    """Return the mean relative error of rows, each at most 1, over the narrower width."""
    width = min(reference.shape[-1], value.shape[-1])
    wanted = reference[:, :width].double()
    norms = wanted.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    errors = (value[:, :width].double() - wanted).norm(dim=1) / norms
    return float(errors.nan_to_num(1.0).clamp(max=1.0).mean()) if len(errors) else 0.0
