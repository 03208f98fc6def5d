"""Giving the tensors of several ranks one numbering: batches, parts of prompts, stages, experts.

Tensor-parallel shards keep their ranks; `parts.py` compares them part by part.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.layouts.context_parallel import PartsOfPasses, find_parts
from assay.offline.layouts.declared import parse_layout
from assay.offline.layouts.experts import number_experts
from assay.offline.layouts.moving import move_all, move_tensor
from assay.offline.tokens.alignment import read_ids

_LAYER = re.compile(r"(.*?\.|)([0-9]+)(\..*|)")


def number_ranks(dump: Dump) -> tuple[Dump, list[str]]:
    """Number batches, parts of prompts, layers and experts over all ranks.

    Returns: the dump, and notes on what was recognized; the same dump if one rank made it.
    """
    ranks = sorted({tensor.site.at.rank for tensor in dump.tensors})
    if len(ranks) < 2:
        return dump, []
    notes = []
    tensors = [replace(tensor, world_rank=tensor.site.at.rank) for tensor in dump.tensors]
    dump = replace(dump, tensors=tensors)
    stages = _find_stages(dump)
    if len(stages) > 1:
        dump = _number_layers(dump, stages)
        notes.append(f"{dump.name}: {len(stages)} pipeline stages hold different layers")
    dump, experts = number_experts(dump)
    if experts:
        notes.append(f"{dump.name}: its experts are numbered on each of {experts} ranks")
    groups = _find_groups(dump)
    if len(groups) > 1 and (parts := find_parts(dump, groups)):
        dump = _number_parts(dump, groups, parts)
        notes.append(
            f"{dump.name}: {len(groups)} groups of ranks hold different tokens of a prompt"
        )
    elif len(groups) > 1:
        dump = _number_batches(dump, groups)
        notes.append(f"{dump.name}: {len(groups)} data-parallel groups hold different prompts")
    return dump, notes


def _find_groups(dump: Dump) -> list[list[int]]:
    """Return the ranks that hold the same tokens, group by group; one group if a rank has no ids."""
    ranks = sorted({tensor.site.at.rank for tensor in dump.tensors})
    first = min((tensor.site.at.micro_batch, tensor.site.at.step) for tensor in dump.tensors)
    groups: list[tuple[Tensor, list[int]]] = []
    for rank in ranks:
        ids = read_ids(dump, [one for one in dump.tensors if _is_of(one, rank, first)])
        if ids is None:
            return [ranks]
        for known, members in groups:
            if torch.equal(known, ids):
                members.append(rank)
                break
        else:
            groups.append((ids, [rank]))
    members_of = [members for _, members in groups]
    return members_of if len({len(members) for members in members_of}) == 1 else [ranks]


def _is_of(tensor: DumpedTensor, rank: int, first: tuple[int, int]) -> bool:
    at = tensor.site.at
    return at.rank == rank and (at.micro_batch, at.step) == first and at.phase == "forward"


def _places(groups: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Return by rank its group and its number there."""
    return {
        rank: (group, number)
        for group, members in enumerate(groups)
        for number, rank in enumerate(members)
    }


def _leave_axes(dump: Dump, groups: list[list[int]]) -> Dump:
    """Give the groups one place on the mesh axes along which they lie: they become passes."""
    axes = {tensor.site.at.rank: tensor.axes for tensor in dump.tensors}
    firsts = [axes[members[0]] for members in groups]
    left = {
        name: (0, 1) for name in firsts[0] if len({one.get(name) for one in firsts}) == len(groups)
    }
    tensors = [replace(tensor, axes={**tensor.axes, **left}) for tensor in dump.tensors]
    return replace(dump, tensors=tensors)


def _number_batches(dump: Dump, groups: list[list[int]]) -> Dump:
    places = _places(groups)
    axes = {tensor.site.at.rank: tensor.axes for tensor in dump.tensors}

    def is_sharded(tensor: DumpedTensor) -> bool:
        """Return True for a parameter of which a group lacks shards, as FSDP divides it."""
        if not tensor.layout or not tensor.site.port.startswith("parameter."):
            return False
        members = groups[places[tensor.site.at.rank][0]]
        return any(
            len({axes[rank].get(axis) for rank in members}) < tensor.axes[axis][1]
            for axis in parse_layout(tensor.layout).axes
            if axis in tensor.axes
        )

    def move(tensor: DumpedTensor) -> DumpedTensor:
        at = tensor.site.at
        group, rank = places[at.rank]
        return move_tensor(tensor, micro_batch=at.micro_batch * len(groups) + group, rank=rank)

    left = _leave_axes(dump, groups)
    pairs = zip(dump.tensors, left.tensors, strict=True)
    return move_all(left, ((new, old if is_sharded(old) else move(new)) for old, new in pairs))


def _number_parts(dump: Dump, groups: list[list[int]], parts: PartsOfPasses) -> Dump:
    """Give each group's part of a prompt its own pass. Passes that all groups share keep one."""
    places = _places(groups)
    dump = _leave_axes(dump, groups)

    def move(tensor: DumpedTensor) -> DumpedTensor:
        at = tensor.site.at
        group, rank = places[at.rank]
        if (at.micro_batch, at.step) not in parts:
            return move_tensor(tensor, step=at.step * len(groups))
        return move_tensor(tensor, step=at.step * len(groups) + group, rank=rank)

    dump = move_all(dump, ((tensor, move(tensor)) for tensor in dump.tensors))
    rows = {
        tensor.site.at: found[tensor.site.at.step % len(groups)]
        for tensor in dump.tensors
        if (found := parts.get((tensor.site.at.micro_batch, tensor.site.at.step // len(groups))))
    }
    return replace(dump, rows={**dump.rows, **rows})


def _find_stages(dump: Dump) -> list[list[int]]:
    """Return the ranks of each pipeline stage, first stage first; one stage if all ranks are alike."""
    modules: dict[int, set[str]] = {}
    for tensor in dump.tensors:
        modules.setdefault(tensor.site.at.rank, set()).add(tensor.site.at.module)
    stages: dict[frozenset[str], list[int]] = {}
    for rank, names in sorted(modules.items()):
        stages.setdefault(frozenset(names), []).append(rank)
    ordered = list(stages.values())
    outside = [{name for name in names if not _LAYER.fullmatch(name)} for names in stages]
    # A pipeline has its embedding on the first stage alone, and its head on the last.
    is_pipeline = len(ordered) > 1 and outside[0] - outside[-1] and outside[-1] - outside[0]
    return ordered if is_pipeline else [sorted(modules)]


def _number_layers(dump: Dump, stages: list[list[int]]) -> Dump:
    """Number layers over all stages, and keep of a module on several stages its ends only."""
    stage_of = {rank: number for number, ranks in enumerate(stages) for rank in ranks}
    layers: list[set[int]] = [set() for _ in stages]
    holders: dict[str, set[int]] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        stage = stage_of[at.rank]
        if found := _LAYER.fullmatch(at.module):
            layers[stage].add(int(found[2]))
        else:
            holders.setdefault(at.module, set()).add(stage)
    is_local = bool(set.intersection(*layers))
    offsets = [
        sum(len(earlier) for earlier in layers[:stage]) if is_local else 0
        for stage in range(len(stages))
    ]
    kept: list[tuple[DumpedTensor, DumpedTensor]] = []
    for tensor in _in_order(dump.tensors, stage_of):
        at = tensor.site.at
        stage = stage_of[at.rank]
        of_module = holders.get(at.module, {stage})
        is_input = tensor.site.port.startswith("input.")
        if len(of_module) > 1 and stage != (min(of_module) if is_input else max(of_module)):
            continue  # what a stage passes to the next one, under the name of the whole
        module = _add_to_layer(at.module, offsets[stage])
        rank = stages[stage].index(at.rank)
        moved = move_tensor(tensor, module=module, rank=rank)
        kept.append((tensor, replace(moved, order=len(kept))))
    return move_all(dump, kept)


def _in_order(tensors: Iterable[DumpedTensor], stage_of: Mapping[int, int]) -> list[DumpedTensor]:
    """Return tensors in the order of the network: pass by pass, stage by stage."""
    return sorted(
        tensors,
        key=lambda one: (
            one.site.at.micro_batch,
            one.site.at.step,
            stage_of[one.site.at.rank],
            one.order,
        ),
    )


def _add_to_layer(module: str, offset: int) -> str:
    found = _LAYER.fullmatch(module)
    return f"{found[1]}{int(found[2]) + offset}{found[3]}" if found and offset else module
