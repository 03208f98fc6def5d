"""Test if a model computes the same numbers twice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.generate.passes.generation_loop import count_tokens
from assay.generate.passes.passes import Side, Work, run_all_forced
from assay.locating.measuring import DriftMeter


@dataclass(frozen=True, slots=True)
class Repeatability:
    """The difference of two runs of the same work."""

    identical: bool
    """True if bitwise equal."""
    spread: float
    """Norm of the difference over the norm of the first run."""


class RepeatedWorks:
    """The works that run twice: the first, and the last, which is the longest and is read in chunks.

    Keeps only their logits from the first run. num_tokens: total over these works.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._numbers = sorted({0, len(works) - 1})
        self._logits: list[Tensor] = []
        self.num_tokens = count_tokens(works[number].batch for number in self._numbers)

    def offer(self, number: int, logits: Tensor) -> None:
        """Keep the logits of work `number` if it runs twice. Called in order for every work."""
        if number in self._numbers:
            self._logits.append(logits)

    def run_again(
        self, side: Side, tokens: Sequence[Tensor], meter: DriftMeter | None = None
    ) -> Repeatability:
        """Run the works again, with the tokens of every work, and compare.

        meter: as in the first run, because hooks change how a compiled model runs.
        """
        works = [self._works[number] for number in self._numbers]
        forced = run_all_forced(side, works, [tokens[number] for number in self._numbers], meter)
        again = [generated.logits for generated in forced]
        pairs = list(zip(again, self._logits, strict=True))
        if all(torch.equal(one, other) for one, other in pairs):
            return Repeatability(identical=True, spread=0.0)
        difference = sum(
            float((one.double() - other.double()).pow(2).sum()) for one, other in pairs
        )
        scale = sum(float(one.double().pow(2).sum()) for one in self._logits)
        return Repeatability(identical=False, spread=math.sqrt(difference / max(scale, 1e-300)))
