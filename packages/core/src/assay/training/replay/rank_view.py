"""How a step is spread over the ranks of a world, as one of them sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.locating.matching.rank_layout import RankLayout
from assay.sites import CallSite
from assay.training.replay.stage_values import PER_MICRO_BATCH, ValueAddress
from assay.training.state.sharding import PartialSums


@dataclass
class RankView:
    """What this rank has of a step.

    partial: gradients before their reduction, of which every rank has a part; None where the
        gradients that are observed are whole.
    summed_by_backward: the ranks over which backward itself adds gradients up; None where it does not.
    layout: tensors at module boundaries; None where every rank has whole ones.
    modules: paths of those that this rank has; None for all.
    partial_modules: modules of which it has only some children.
    micro_batches_run: step and number of each micro-batch that it has run.
    """

    partial: PartialSums | None = None
    summed_by_backward: PartialSums | None = None
    layout: RankLayout | None = None
    modules: frozenset[str] | None = None
    partial_modules: frozenset[str] = frozenset()
    micro_batches_run: set[tuple[int, int]] = field(default_factory=set)

    def is_own_call(self, site: CallSite) -> bool:
        """Whether this rank had to make a call of the reference."""
        return (site.step, site.micro_batch) in self.micro_batches_run and self._has(site.module)

    def is_own_value(self, step: int, address: ValueAddress) -> bool:
        """Whether this rank had to show a value of the reference's step."""
        if address.port == "loss" and self.modules is not None:
            return False  # a pipeline's schedule keeps the losses of its micro-batches
        if address.port in PER_MICRO_BATCH:
            return (step, address.index) in self.micro_batches_run
        return not address.stage.module or self._has(address.stage.module)

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank has of a whole state: its parameters, and their moments."""
        return dict(state) | {
            kind: {
                name: value
                for name, value in state[kind].items()
                if self._has(name.rpartition(".")[0])
            }
            for kind in ("model", "moments")
        }

    def _has(self, module: str) -> bool:
        return self.modules is None or (
            module in self.modules and module not in self.partial_modules
        )
