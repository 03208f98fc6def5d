"""New addresses for the tensors of a dump, such as passes for the graphs that share a folder."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from assay.dumps.protocol import Dump, DumpedTensor
from assay.sites import Site


def move_tensor(tensor: DumpedTensor, **changes: object) -> DumpedTensor:
    """Return a tensor with changed fields of its `CallSite`."""
    at = replace(tensor.site.at, **changes)  # type: ignore[arg-type]  # fields of CallSite
    return replace(tensor, site=Site(at, tensor.site.port))


def move_all(dump: Dump, moves: Iterable[tuple[DumpedTensor, DumpedTensor]]) -> Dump:
    """Return a dump with the first tensor of each pair replaced by the second. Rows move along."""
    moves = list(moves)
    rows = {new.site.at: dump.rows[old.site.at] for old, new in moves if old.site.at in dump.rows}
    return replace(dump, tensors=[new for _, new in moves], rows=rows)


def join_later_calls(dump: Dump) -> Dump:
    """Give calls after a forward pass the number of that pass.

    An engine computes logits in a module of its own, after the model has returned.
    """
    modules: dict[tuple[int, int], set[str]] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        modules.setdefault((at.micro_batch, at.step), set()).add(at.module)
    whole = {key for key, names in modules.items() if "" in names}
    called = set().union(*(modules[key] for key in whole))
    later = {
        key: before[1]
        for before, key in pairwise(sorted(modules))
        if before in whole and before[0] == key[0] and not modules[key] & called
    }
    if not later or dump.is_training:
        return dump
    keys = ((one, (one.site.at.micro_batch, one.site.at.step)) for one in dump.tensors)
    return move_all(
        dump, [(one, move_tensor(one, step=later.get(key, key[1]))) for one, key in keys]
    )


def number_single_passes(dump: Dump) -> Dump:
    """Return a dump whose passes have numbers of their own, where each folder holds one pass."""
    if dump.is_training or any(one.site.at.step for one in dump.tensors):
        return dump
    moved = [move_tensor(one, step=one.site.at.micro_batch, micro_batch=0) for one in dump.tensors]
    return move_all(dump, zip(dump.tensors, moved, strict=True))


_NUMBERED = re.compile(r"([0-9]+)_(\w+)")


def split_mixed_passes(dump: Dump) -> tuple[Dump, str]:
    """Separate prefill and decode steps into passes with the same module names.

    Accelerator libraries build one graph for the prefill and one for decode steps, and number the operations
    through both. The folder of the first token holds both graphs.
    Returns: the dump, and a note; the same dump and "" if no folder is mixed.
    """
    tops_of_step: dict[int, list[str]] = {}
    for tensor in dump.tensors:
        tops = tops_of_step.setdefault(tensor.site.at.step, [])
        top = _top(tensor)
        if top not in tops:
            tops.append(top)
    names = [sorted(tops, key=_number) for tops in tops_of_step.values()]
    if not all(_NUMBERED.fullmatch(name) for tops in names for name in tops):
        return dump, ""
    prefill, decode = _find_graphs(names)
    if not prefill:
        return dump, ""
    renamed = dict(zip(decode, prefill, strict=True))
    passes: dict[tuple[int, bool], int] = {}
    for step, tops in sorted(tops_of_step.items()):
        for is_decode, graph in ((False, prefill), (True, decode)):
            if set(graph) & set(tops):
                passes[step, is_decode] = len(passes)
    tensors = []
    for tensor in dump.tensors:
        at, top = tensor.site.at, _top(tensor)
        is_decode = top in renamed
        module = renamed.get(top, top) + at.module[len(top) :]
        tensors.append(move_tensor(tensor, step=passes[at.step, is_decode], module=module))
    mixed = [str(step) for step in tops_of_step if {(step, False), (step, True)} <= set(passes)]
    note = f"folder {', '.join(mixed)} of {dump.name} holds the prefill and the first decode step"
    return replace(dump, tensors=tensors), note if mixed else ""


def _top(tensor: DumpedTensor) -> str:
    return tensor.site.at.module.partition(".")[0]


def _number(name: str) -> int:
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else 0


def _find_graphs(tops_of_steps: Sequence[list[str]]) -> tuple[list[str], list[str]]:
    """Return the operations of the prefill graph and of the decode graph; empty for a single graph."""
    every = set().union(*tops_of_steps)
    decode = min((set(tops) for tops in tops_of_steps), key=len, default=set())
    prefill = every - decode
    if not prefill and len(every) % 2 == 0:
        # Every folder holds both graphs, so the operations repeat.
        ordered = sorted(every, key=_number)
        half = len(ordered) // 2
        prefill, decode = set(ordered[:half]), set(ordered[half:])
    graphs = sorted(prefill, key=_number), sorted(decode, key=_number)
    types = [[name.partition("_")[2] for name in graph] for graph in graphs]
    return graphs if types[0] == types[1] and types[0] else ([], [])
