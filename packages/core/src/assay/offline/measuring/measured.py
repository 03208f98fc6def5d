"""The results of comparing all pairs of two dumps."""

from dataclasses import dataclass, field

from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.metrics import PairSums
from assay.offline.measuring.norm_sums import NormSums
from assay.offline.ports.lanes import Port
from assay.sites import Phase
from assay.stages import Stage


@dataclass(slots=True)
class Measured:
    """Measurements of two dumps."""

    results: dict[tuple[Phase, int, int], ReplayResults] = field(default_factory=dict)
    """By phase, rank and step of the actual dump, the sums of every port.

    The step of a generation is 0: its passes are pooled.
    """
    compared: int = 0
    updates: list[Port] = field(default_factory=list)
    """Changes of parameters between training steps, which no dump holds as such."""
    unpaired: list[str] = field(default_factory=list)
    """Tensors whose partner is missing in some passes, or has a shape that cannot be matched."""
    norm_errors: dict[tuple[Port, int, int], float] = field(default_factory=dict)
    """By port, rank and step, the largest relative difference of two norms, where values are not compared."""
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """By side, the ports of which it holds the same values twice in a pass."""
    sums: type[PairSums] = PairSums
    """Sums of activations. Weights need their norms only, gradients and updates all sums."""
    drift: dict[int, NormSums] = field(default_factory=dict)
    """By training step, the difference of all parameters at its start."""
    replica_errors: dict[tuple[Port, int], float] = field(default_factory=dict)
    """By port and rank of EXPECTED, the largest difference of a value that ranks must share."""

    def add_replica(self, port: Port, rank: int, error: float) -> None:
        """Add the difference of a replica of EXPECTED from the first one."""
        self.replica_errors[port, rank] = max(self.replica_errors.get((port, rank), 0.0), error)

    def add_drift(self, step: int, dd: float, ee: float) -> None:
        """Add the squares of the difference of a parameter, and of its expected values."""
        known = self.drift.setdefault(step, NormSums())
        known.dd += dd
        known.ee += ee

    def of(self, port: Port) -> list[PortResult]:
        """Return the sums of a port, one for each step and rank at which it was measured."""
        found = (
            results.ports.get((port.module, port.name))
            for (phase, _, _), results in self.results.items()
            if phase == port.phase
        )
        return sorted(
            (one for one in found if one is not None), key=lambda one: (one.step, one.rank)
        )

    def at(self, port: Port, rank: int, step: int, value: Tensor, class_name: str) -> PortResult:
        """Return the sums to which a pair of tensors is added."""
        results = self.results.setdefault((port.phase, rank, step), ReplayResults())
        dtype = str(value.dtype).removeprefix("torch.")
        stage = Stage(port.module, port.phase)
        result = results.at(port.module, port.name, stage, dtype, class_name)
        sums = self.sums if port.phase == "forward" else PairSums
        if port.phase == "forward" and port.direction == "parameter":
            sums = NormSums
        if type(result.sums) is not sums:  # a new one
            result.sums = sums()
        result.rank, result.step = rank, step
        return result

    def extend(self, later: "Measured") -> None:
        """Add what was measured of later pairs, at other ports."""
        for key, results in later.results.items():
            known = self.results.setdefault(key, ReplayResults()).ports
            for place, result in results.ports.items():
                result.order = len(known)
                known[place] = result
        self.compared += later.compared
        self.updates += later.updates
        self.unpaired += later.unpaired
        self.norm_errors |= later.norm_errors
        for step, sums in later.drift.items():
            self.add_drift(step, sums.dd, sums.ee)
        self.replica_errors |= later.replica_errors
        for side, places in later.repeated.items():
            self.repeated.setdefault(side, []).extend(places)
