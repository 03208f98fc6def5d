"""The measurements of all pairs of two dumps."""

from dataclasses import dataclass, field

from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.metrics import NormSums, PairSums
from assay.offline.measuring.metrics import TensorPair
from assay.offline.measuring.pair_values import Coarseness
from assay.offline.pairing.port_series import Port
from assay.sites import Phase
from assay.stages import Stage
from assay.statistics import worst_error


@dataclass(slots=True)
class MeasuredPorts:
    """The measurements of two dumps by port."""

    results: dict[tuple[Phase, int, int], ReplayResults] = field(default_factory=dict)
    """The sums of every port, by phase, rank and step of ACTUAL. A generation pools its passes as step 0."""
    compared: int = 0
    updates: list[Port] = field(default_factory=list)
    """Ports of parameter changes between training steps, computed from the parameters."""
    unpaired: list[str] = field(default_factory=list)
    """Tensors without a partner in some passes, or with an incompatible shape."""
    norm_errors: dict[tuple[Port, int, int], float] = field(default_factory=dict)
    """Largest relative difference of norms by port, rank and step, where values are not compared."""
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """By side, the ports that repeat the same values in a pass."""
    sums: type[PairSums] = PairSums
    """The kind of sums for activations. Weights need norms only, gradients and updates all sums."""
    drift: dict[int, NormSums] = field(default_factory=dict)
    """Difference of all parameters at the start of each training step."""
    num_sign_flips: int = 0
    """Elements of updates that are excused, see `excuse_sign_flips`."""
    replica_errors: dict[tuple[Port, int], float] = field(default_factory=dict)
    """Largest difference between replicas, by port and rank of EXPECTED."""
    pairs: list[TensorPair] = field(default_factory=list)
    """Every pair with its metrics, if they are wanted."""
    coarse: dict[Port, Coarseness] = field(default_factory=dict)
    """Ports whose values lie on a coarser grid on one side."""

    def add_replica(self, port: Port, rank: int, error: float) -> None:
        """Add the difference of a replica in EXPECTED from the first one."""
        known = self.replica_errors.get((port, rank), 0.0)
        self.replica_errors[port, rank] = worst_error([known, error])

    def add_drift(self, step: int, dd: float, ee: float) -> None:
        """Add the squared norms of a parameter's difference and of its expected values."""
        known = self.drift.setdefault(step, NormSums())
        known.dd += dd
        known.ee += ee

    def of(self, port: Port) -> list[PortResult]:
        """Return the sums of a port for each measured step and rank."""
        found = (
            results.ports.get((port.module, port.name))
            for (phase, _, _), results in self.results.items()
            if phase == port.phase
        )
        return sorted(
            (one for one in found if one is not None), key=lambda one: (one.step, one.rank)
        )

    def at(self, port: Port, rank: int, step: int, value: Tensor, class_name: str) -> PortResult:
        """Return the sums of a port at a rank and step, which are created if needed."""
        results = self.results.setdefault((port.phase, rank, step), ReplayResults())
        dtype = str(value.dtype).removeprefix("torch.")
        stage = Stage(port.module, port.phase)
        result = results.at(port.module, port.name, stage, dtype, class_name)
        sums = self.sums if port.phase == "forward" else PairSums
        if port.phase == "forward" and port.direction == "parameter":
            sums = NormSums
        if type(result.sums) is not sums:
            result.sums = sums()
        result.rank, result.step = rank, step
        return result

    def extend(self, later: "MeasuredPorts") -> None:
        """Add the measurements of later pairs, which have other ports."""
        for key, results in later.results.items():
            known = self.results.setdefault(key, ReplayResults()).ports
            for place, result in results.ports.items():
                result.order = len(known)
                known[place] = result
        self.compared += later.compared
        self.num_sign_flips += later.num_sign_flips
        self.updates += later.updates
        self.unpaired += later.unpaired
        self.norm_errors |= later.norm_errors
        for step, sums in later.drift.items():
            self.add_drift(step, sums.dd, sums.ee)
        self.replica_errors |= later.replica_errors
        self.pairs += later.pairs
        self.coarse |= later.coarse
        for side, places in later.repeated.items():
            self.repeated.setdefault(side, []).extend(places)
