"""Detection of runs whose last pass was cut off."""

import re

from assay.comparing.wording import dumps as wording
from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.ports.lanes import Port


def find_cut_off(dump: Dump) -> list[str]:
    """Return a problem for each rank whose last pass ends before the point where earlier passes end.

    An evaluation after training has no backward, so it ends early too. A dump that records its end is exempt.
    """
    if dump.is_finished:
        return []
    by_rank: dict[int, list[DumpedTensor]] = {}
    for tensor in sorted(dump.tensors, key=lambda one: one.order):
        by_rank.setdefault(tensor.site.at.rank, []).append(tensor)
    return [
        wording.describe_cut_off(last.site.at.step, rank, last.site.at.module)
        for rank, tensors in by_rank.items()
        if _is_cut_off(tensors)
        for last in tensors[-1:]
    ]


def _is_cut_off(tensors: list[DumpedTensor]) -> bool:
    passes: dict[tuple[int, int], dict[Port, None]] = {}
    for one in tensors:
        at = one.site.at
        ports = passes.setdefault((at.micro_batch, at.step), {})
        ports[Port(at.module, one.site.port, at.phase)] = None
    at = tensors[-1].site.at
    last = passes.pop((at.micro_batch, at.step))
    if not passes:
        return at.phase == "forward" and _is_inside_unfinished(at.module, last)
    before = list(passes[list(passes)[-1]])
    missing = [port for port in before if port not in last]
    return 0 < len(missing) < len(before) and before[-len(missing) :] == missing


def _is_inside_unfinished(module: str, ports: dict[Port, None]) -> bool:
    """Return True if a block around a module has no output, and a similar block has one."""
    finished = {port.module for port in ports if port.direction == "output"}
    kinds = {re.sub(r"\d+", "*", one) for one in finished}
    parts = module.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(one not in finished and re.sub(r"\d+", "*", one) in kinds for one in around)
