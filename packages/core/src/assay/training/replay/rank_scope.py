"""The part of a model and of a step that one rank has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.locating.ports import RankLayout
from assay.sites import CallSite
from assay.training.replay.stage_values import PER_MICRO_BATCH, ValueAddress
from assay.training.state.sharding import PartialSums


@dataclass
class RankScope:
    """The modules, micro-batches and sums of one rank."""

    partial: PartialSums | None = None
    """Gradients before their reduction, a part on each rank; None if observed gradients are whole."""
    summed_by_backward: PartialSums | None = None
    """The ranks over which backward itself reduces gradients; None if it does not."""
    layout: RankLayout | None = None
    """Layout of the tensors at module boundaries; None if every rank has whole tensors."""
    modules: frozenset[str] | None = None
    """Paths of this rank's modules; None for all."""
    partial_modules: frozenset[str] = frozenset()
    """Modules of which this rank has only some children."""
    micro_batches_run: set[tuple[int, int]] = field(default_factory=set)
    """Step and number of each micro-batch that this rank has run."""

    def is_own_call(self, site: CallSite) -> bool:
        """Return True if this rank has to make a call of the reference."""
        return (site.step, site.micro_batch) in self.micro_batches_run and self._has(site.module)

    def is_own_value(self, step: int, address: ValueAddress) -> bool:
        """Return True if this rank has to show a value of the reference's step."""
        if address.port == "loss" and self.modules is not None:
            return False  # the schedule of a pipeline does not return losses of micro-batches
        if address.port in PER_MICRO_BATCH:
            return (step, address.index) in self.micro_batches_run
        return not address.stage.module or self._has(address.stage.module)

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole state: its parameters and their moments."""
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
