"""Detection of layers that are quantized on one side only."""

from collections.abc import Mapping
from dataclasses import dataclass

from assay.comparing.wording import dumps as wording
from assay.offline.measuring.coarseness import Coarseness
from assay.offline.ports.lanes import LanePair, Lanes, Port

# Storage dtypes of quantized weights. int64 is left out: counters have it.
_STORED = ("int8", "uint8", "int32", "float8")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A module that only one side quantizes."""

    module: str
    side: str
    """EXPECTED or ACTUAL."""
    sign: str
    """The evidence, in words."""


def find_quantized_layers(
    expected: Lanes, actual: Lanes, pairs: list[LanePair], coarse: Mapping[Port, Coarseness]
) -> list[QuantizedLayer]:
    """Return the modules whose weights or results are quantized on one side only, in order.

    coarse: ports whose values lie on a coarser grid on one side.
    """
    stored = [_find_stored_dtypes(lanes) for lanes in (expected, actual)]
    found: dict[str, QuantizedLayer] = {}
    for pair in pairs:
        names = pair.expected.port.module, pair.actual.port.module
        dtypes = [known.get(name) for known, name in zip(stored, names, strict=True)]
        port = pair.port
        if bool(dtypes[0]) != bool(dtypes[1]):
            side = "EXPECTED" if dtypes[0] else "ACTUAL"
            sign = wording.describe_stored(str(dtypes[0] or dtypes[1]))
        elif port in coarse:
            side = coarse[port].side
            what = "weights" if port.direction == "parameter" else "results"
            sign = wording.describe_coarse(what, coarse[port].actual, coarse[port].expected)
        else:
            continue
        found.setdefault(port.module, QuantizedLayer(port.module, side, sign))
    return list(found.values())


def _find_stored_dtypes(lanes: Lanes) -> dict[str, str]:
    return {
        port.module: lane.first.dtype
        for port, lane in lanes.items()
        if port.direction == "parameter"
        and port.phase == "forward"
        and lane.first.dtype.startswith(_STORED)
    }
