"""Choices of routers and indexers between nearly equal scores, which noise alone changes.

In a replay, the rows of such a choice are left out. In a free run, errors inherited from earlier layers
change the order of nearly equal scores, and another expert computes the token. The difference is far above
rounding, and not a fault of the candidate. Such a choice is replaced by the reference's, so that later
values can be compared. A choice that differs by more than the noise is kept.

Shape legend: R tokens, k experts for each, E experts, G groups of experts.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from assay.hooks.expert_choices import ExpertChoice, Selection

# A choice can flip if the margin is within this many times the rms error of the scores in a healthy
# run: scores may have 3.2 times that error before they fail (the limit of replay-tensor), and eight of
# its standard deviations are over five of a difference of two scores.
TIE_MARGIN = 8.0 * 3.2

# Indices are a choice by these scores if they are their largest in most rows.
_MOSTLY = 0.5


def near_tie_rows(actual: Tensor, expected: Tensor, scores: Tensor, error: float) -> Tensor:
    """Return the rows whose choice differs only because scores are nearly equal, (R,) bool.

    error: root mean square error of the scores in a healthy run of the same dtype.
    Shapes: actual and expected (R, k) indices, best first; scores (R, E).
    In such a row, `expected` are the k largest of `scores`, and the score of each choice is within the
    margin of the score of the expected choice in its column.
    """
    scores = scores.double()
    top = scores.topk(expected.shape[-1], dim=-1).indices.sort(-1).values
    is_choice = (top == expected.sort(-1).values).all(-1)
    gap = (scores.gather(-1, expected) - scores.gather(-1, actual)).abs().amax(-1)
    differs = (actual != expected).any(-1)
    return differs & is_choice & (gap <= TIE_MARGIN * error)


def may_be_routing(outputs: Mapping[str, Tensor]) -> bool:
    """Return True if there are both indices and scores among these results."""
    return len({tensor.is_floating_point() for tensor in outputs.values()}) > 1


def find_choice(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[str, str] | None:
    """Return the ports of the first indices that other results of a call decide, and of these scores.

    Shapes: of both sides the results of two dims.
    """
    for port, indices in actual.items():
        if not indices.is_floating_point() and indices.shape == expected[port].shape:
            siblings = {other: expected[other] for other in actual if other != port}
            scores = find_scores(expected[port], siblings)
            if scores is not None:
                return port, scores
    return None


def columns_in_order(actual: Tensor, expected: Tensor) -> Tensor | None:
    """Return the columns of `actual` in the order of `expected`; None if they are in that order.

    An unsorted top-k returns experts in any order. Experts that only `actual` has take the places of
    those that only `expected` has.
    Shapes: all (R, k); a row with an expert twice keeps its order.
    """
    alike_Rke = expected[:, :, None] == actual[:, None, :]
    is_shared, column = alike_Rke.any(2), alike_Rke.int().argmax(2)
    of_others = torch.zeros_like(column)
    lacking = is_shared.int().argsort(stable=True, dim=1)
    others = alike_Rke.any(1).int().argsort(stable=True, dim=1)
    of_others.scatter_(1, lacking, others)
    columns = torch.where(is_shared, column, of_others)
    own = torch.arange(actual.shape[1]).expand_as(columns)
    is_order = (columns.sort(1).values == own).all(1, keepdim=True)
    columns = torch.where(is_order, columns, own)
    return None if torch.equal(columns, own) else columns


def find_order(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Tensor | None:
    """Return `columns_in_order` of the first indices for which one result has the same shape.

    Shapes: of both sides the results of two dims.
    """
    shapes = [tensor.shape for tensor in actual.values() if tensor.is_floating_point()]
    for port, indices in actual.items():
        is_choice = not indices.is_floating_point() and shapes.count(indices.shape) == 1
        if is_choice and indices.shape == expected[port].shape:
            return columns_in_order(indices, expected[port])
    return None


def root_mean_square(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the error of `actual`."""
    return float((actual.double() - expected.double()).pow(2).mean().sqrt())


def find_scores(indices: Tensor, siblings: dict[str, Tensor]) -> str | None:
    """Return the name of the sibling output whose largest entries `indices` are."""
    for name, scores in siblings.items():
        if scores.is_floating_point() and scores.ndim == 2 and indices.ndim == 2:
            num_rows, k = indices.shape
            if scores.shape[0] == num_rows and scores.shape[1] > k:
                values, top = scores.double().topk(k, dim=-1)
                decided = values[:, -1] > -torch.inf  # else masked keys fill the row in any order
                alike = (top.sort(-1).values == indices.sort(-1).values).all(-1)[decided]
                if bool(alike.float().mean() > _MOSTLY):
                    return name
    return None


_PARTS = ("indices", "weights", "scores", "groups", "num_groups")


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """A choice of the reference, and the scores that decided it."""

    indices: Tensor
    """(R, k)."""
    weights: Tensor
    """(R, k)."""
    scores: Tensor | None
    """(R, E); `indices` are the largest."""
    groups: Tensor | None = None
    """Scores of the groups of experts, (R, G); None if every expert could be chosen."""
    num_groups: int = 0
    """Number of groups that the choice was limited to."""

    @classmethod
    def of(cls, choice: ExpertChoice) -> "RecordedChoice":
        """Copy a choice to the host."""
        indices = choice.indices.detach().cpu()
        selections = [
            Selection(item.scores.cpu(), item.count)
            for item in choice.selections
            if len(item.scores) == len(indices)
        ]
        scores = _deciding_scores(indices, selections)
        recorded = cls(indices, choice.weights.detach().cpu(), scores)
        groups = _deciding_groups(scores, selections)
        if groups is None:
            return recorded
        return replace(recorded, groups=groups.scores, num_groups=groups.count)

    def to_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return named tensors for a trace."""
        parts = {name: getattr(self, name) for name in _PARTS if name != "num_groups"}
        parts["num_groups"] = torch.tensor(self.num_groups)
        return {f"{prefix}/{name}": part for name, part in parts.items() if part is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str) -> "RecordedChoice":
        """Restore a choice from the result of `to_tensors`."""
        parts: dict[str, Any] = {name: tensors.get(f"{prefix}/{name}") for name in _PARTS}
        return cls(**{**parts, "num_groups": int(parts["num_groups"])})

    def select_row(self, row: int | None, num_rows: int) -> "RecordedChoice":
        """Return the part of one of the batch's `num_rows` texts; all for None."""
        if row is None:
            return self
        size = len(self.indices) // num_rows
        rows = slice(row * size, (row + 1) * size)
        cut = {
            name: part[rows] for name in _PARTS[:-1] if (part := getattr(self, name)) is not None
        }
        return replace(self, **cut)


@dataclass(frozen=True, slots=True)
class ScoreNoise:
    """Root mean square errors of a router's scores of experts and of groups in a healthy free run."""

    scores: float
    groups: float


def _deciding_scores(indices: Tensor, selections: list[Selection]) -> Tensor | None:
    """Return the scores of the last selection whose largest entries `indices` are."""
    for item in reversed(selections):
        if find_scores(indices, {"scores": item.scores}) is not None:
            return item.scores
    return None


def _deciding_groups(scores: Tensor | None, selections: list[Selection]) -> Selection | None:
    """Find an earlier selection of groups: fewer columns, each for the same number of experts."""
    if scores is None:
        return None
    num_experts = scores.shape[1]
    for item in selections:
        if item.scores is scores:
            return None
        num_groups = item.scores.shape[1]
        if 1 < num_groups < num_experts and num_experts % num_groups == 0:
            return item if item.count < num_groups else None
    return None


def chosen_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Return which experts compute each token, (R, E) bool, from (R, k); ignores indices beyond E."""
    wide = torch.zeros(len(indices), num_experts + 1, dtype=torch.bool)
    beyond = (indices < 0) | (indices >= num_experts)
    wide.scatter_(1, indices.long().masked_fill(beyond, num_experts), value=True)
    return wide[:, :num_experts]


def within_noise(actual_Rk: Tensor, expected: RecordedChoice, noise: ScoreNoise) -> Tensor:
    """Return the rows in which noise alone may have changed the choice to `actual`, (R,) bool.

    The same number of experts is chosen, and no open expert that was not chosen has a score above that
    of a chosen one by more than the margin. If groups are chosen first, another group may replace the
    worst one under the same condition.
    """
    if expected.scores is None:
        return torch.zeros(len(actual_Rk), dtype=torch.bool)
    scores = expected.scores.double()
    num_experts = scores.shape[1]
    taken = chosen_experts(actual_Rk, num_experts)
    open_RE = torch.ones_like(taken)
    groups_agree = torch.ones(len(taken), dtype=torch.bool)
    if expected.groups is not None:
        of_groups = Selection(expected.groups, expected.num_groups)
        open_RE, groups_agree = _open_experts(taken, of_groups, noise.groups)
    left_out = scores.masked_fill(taken | ~open_RE, -torch.inf).amax(1)
    least = scores.masked_fill(~taken | ~open_RE, torch.inf).amin(1)
    # Written so that a NaN is not a near tie.
    small = left_out - least <= TIE_MARGIN * noise.scores
    return small & groups_agree & (taken.sum(1) == actual_Rk.shape[1])


def _open_experts(taken: Tensor, expected: Selection, error: float) -> tuple[Tensor, Tensor]:
    """Return the experts whose scores decide, (R, E) bool, and the rows with equal groups, (R,) bool.

    The scores of experts in a group that the reference excluded are unknown.
    """
    groups = expected.scores.double()
    size = taken.shape[1] // groups.shape[1]
    opened = chosen_experts(groups.topk(expected.count, dim=1).indices, groups.shape[1])
    used = taken.unflatten(1, (-1, size)).any(2)
    intruders = used & ~opened
    # They replaced the worst opened groups from which nothing was chosen.
    num_needed = intruders.sum(1, keepdim=True)
    spare = opened & ~used
    rank = groups.masked_fill(~spare, torch.inf).argsort(1).argsort(1)
    replaced = spare & (rank < num_needed)
    best_replaced = groups.masked_fill(~replaced, -torch.inf).amax(1)
    least_intruder = groups.masked_fill(~intruders, torch.inf).amin(1)
    enough_room = (spare.sum(1, keepdim=True) >= num_needed)[:, 0]
    agree = enough_room & (best_replaced - least_intruder <= TIE_MARGIN * error)
    return (opened & ~replaced).repeat_interleave(size, 1), agree


Key = tuple[int, int, str]


@dataclass
class ChoiceRecorder:
    """A handler that keeps every choice of a run, and changes none."""

    choices: dict[Key, RecordedChoice] = field(default_factory=dict)
    """Choices by step, call and module."""

    def choose(self, choice: ExpertChoice) -> None:
        """Keep a choice."""
        self.choices[choice.step, choice.call, choice.module] = RecordedChoice.of(choice)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return named tensors for a trace."""
        return {
            name: tensor
            for (step, call, module), choice in self.choices.items()
            for name, tensor in choice.to_tensors(f"{step}/{call}/{module}").items()
        }


def read_choices(tensors: Mapping[str, Tensor]) -> dict[Key, RecordedChoice]:
    """Restore the choices of `ChoiceRecorder.to_tensors`, by step, call and module."""
    found: dict[Key, RecordedChoice] = {}
    for prefix in dict.fromkeys(name.rpartition("/")[0] for name in tensors):
        step, call, module = prefix.split("/", 2)
        found[int(step), int(call), module] = RecordedChoice.from_tensors(tensors, prefix)
    return found


@dataclass
class _ErrorSum:
    squares: float = 0.0
    count: int = 0

    def add(self, actual: Tensor, expected: Tensor, rows: Tensor) -> None:
        error = (actual.double() - expected.double())[rows]
        error = error[error.isfinite()]
        self.squares += float(error.square().sum())
        self.count += error.numel()

    @property
    def root_mean_square(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass
class NoiseOfChoices:
    """A handler for the noise run: a choice that differs from the recorded one is noise, and replaced."""

    expected: Mapping[Key, RecordedChoice] = field(default_factory=dict)
    """Choices of the running batch. The caller sets it before each batch."""
    _scores: dict[str, _ErrorSum] = field(default_factory=lambda: defaultdict(_ErrorSum))
    _groups: dict[str, _ErrorSum] = field(default_factory=lambda: defaultdict(_ErrorSum))

    def choose(self, choice: ExpertChoice) -> tuple[Tensor, Tensor] | None:
        """Measure the scores' error, and return the recorded choice if another one was made."""
        expected = self.expected.get((choice.step, choice.call, choice.module))
        if expected is None or expected.indices.shape != choice.indices.shape:
            return None
        actual = RecordedChoice.of(choice)
        if actual.scores is not None and expected.scores is not None:
            num_experts = expected.scores.shape[1]
            # Scores are masked differently if other groups are open.
            alike = (
                chosen_experts(actual.indices, num_experts)
                == chosen_experts(expected.indices, num_experts)
            ).all(1)
            if actual.groups is not None and expected.groups is not None:
                everywhere = torch.ones_like(alike)
                self._groups[choice.module].add(actual.groups, expected.groups, everywhere)
                opened = [
                    side.groups.topk(side.num_groups, dim=1).indices.sort(1).values
                    for side in (actual, expected)
                    if side.groups is not None
                ]
                alike &= (opened[0] == opened[1]).all(1)
            self._scores[choice.module].add(actual.scores, expected.scores, alike)
        return replaced_choice(choice, expected, _differs(choice, expected))

    def noise(self) -> dict[str, ScoreNoise]:
        """Return the noise of each group of experts."""
        return {
            module: ScoreNoise(scores.root_mean_square, self._groups[module].root_mean_square)
            for module, scores in self._scores.items()
        }


@dataclass
class NearTieChoices:
    """A handler for the candidate: restores the recorded choice where noise alone changed it."""

    noise: Mapping[str, ScoreNoise]
    expected: Mapping[Key, RecordedChoice] = field(default_factory=dict)
    """Choices of the running batch. The caller sets it before each batch."""
    num_replaced: int = 0
    """Number of tokens whose choice differs within the noise."""

    def choose(self, choice: ExpertChoice) -> tuple[Tensor, Tensor] | None:
        """Return the choice with the recorded one in the rows of near ties."""
        expected = self.expected.get((choice.step, choice.call, choice.module))
        noise = self.noise.get(choice.module)
        if expected is None or noise is None or expected.indices.shape != choice.indices.shape:
            return None
        differs = _differs(choice, expected)
        if not bool(differs.any()):
            return None
        ties = differs & within_noise(choice.indices.detach().cpu(), expected, noise)
        self.num_replaced += int(ties.sum())
        return replaced_choice(choice, expected, ties)


def _differs(choice: ExpertChoice, expected: RecordedChoice) -> Tensor:
    """Return the rows with other experts, ignoring their order."""
    actual = choice.indices.detach().cpu().long()
    return (actual.sort(1).values != expected.indices.long().sort(1).values).any(1)


def replaced_choice(
    choice: ExpertChoice, expected: RecordedChoice, rows: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return indices and weights of a call with the recorded ones in `rows`; None without such rows."""
    if not bool(rows.any()):
        return None
    indices, weights = choice.indices, choice.weights
    at = rows[:, None]
    return (
        torch.where(at.to(indices.device), expected.indices.to(indices), indices),
        torch.where(at.to(weights.device), expected.weights.to(weights), weights),
    )
