"""The import of dumps: one order, and one number for each pass, batch, layer and expert, on all ranks.

It also finds signs that a dump does not hold a whole run: a cut-off end, lost ranks, reused buffers.
Tensor-parallel shards keep their ranks. `measuring/placed_parts.py` compares them part by part.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, arange

from assay.comparison.measuring.placed_parts import LayoutError, parse_layout, place_declared
from assay.comparison.pairing.passes import Pass, find_passes, read_ids, read_positions
from assay.comparison.pairing.port_series import (
    ROUTERS,
    Port,
    Series,
    SeriesByPort,
    collect_series,
    without_numbers,
)
from assay.dumps.protocol import Dump, DumpedTensor, DumpError
from assay.errors import name_some
from assay.files import read_lines
from assay.judge.wording import format_count
from assay.sites import RowMap


def import_dump(dump: Dump) -> Dump:
    """Give passes, batches, layers and experts the same numbers in all folders and ranks."""
    dump = number_ranks(split_mixed_passes(join_later_calls(number_single_passes(dump))))
    return replace(dump, problems=[*dump.problems, *find_cut_off(dump)])


def take_order(dump: Dump, file: str | None) -> Dump:
    """Sort the tensors of a dump by the modules of --order.

    Raises: DumpError unless the file names exactly the modules of the dump.
    """
    if file is None:
        return dump
    lines = [line.strip() for _, line in read_lines(Path(file).expanduser())]
    places = {name: place for place, name in enumerate(lines)}
    modules = {one.site.at.module: None for one in dump.tensors}
    for problem, names in (
        ("lacks modules of", [one for one in modules if one not in places]),
        ("names modules that are not in", [one for one in places if one not in modules]),
    ):
        if names:
            raise DumpError(f"--order {file} {problem} {dump.name}: {name_some(names)}")
    tensors = sorted(dump.tensors, key=lambda one: places[one.site.at.module])
    tensors = [replace(one, order=number) for number, one in enumerate(tensors)]
    return replace(dump, tensors=tensors, is_ordered=True)


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
    return replace(dump, tensors=[one.moved(step=later.get(key, key[1])) for one, key in keys])


def number_single_passes(dump: Dump) -> Dump:
    """Return a dump whose passes have numbers of their own, where each folder holds one pass."""
    if dump.is_training or any(one.site.at.step for one in dump.tensors):
        return dump
    tensors = [one.moved(step=one.site.at.micro_batch, micro_batch=0) for one in dump.tensors]
    return replace(dump, tensors=tensors)


_NUMBERED = re.compile(r"([0-9]+)_(\w+)")


def split_mixed_passes(dump: Dump) -> Dump:
    """Separate prefill and decode steps into passes with the same module names.

    Accelerator libraries build one graph for the prefill and one for decode steps, and number the operations
    through both. The folder of the first token holds both graphs.
    """
    tops_of_step: dict[int, list[str]] = {}
    for tensor in dump.tensors:
        tops = tops_of_step.setdefault(tensor.site.at.step, [])
        top = _top(tensor)
        if top not in tops:
            tops.append(top)
    names = [sorted(tops, key=_number) for tops in tops_of_step.values()]
    if not all(_NUMBERED.fullmatch(name) for tops in names for name in tops):
        return dump
    prefill, decode = _find_graphs(names)
    if not prefill:
        return dump
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
        tensors.append(tensor.moved(step=passes[at.step, is_decode], module=module))
    mixed = [str(step) for step in tops_of_step if {(step, False), (step, True)} <= set(passes)]
    note = f"folder {', '.join(mixed)} of {dump.name} holds the prefill and the first decode step"
    return replace(dump, tensors=tensors, notes=[*dump.notes, *([note] if mixed else [])])


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


# The rows of every group of ranks, by batch and step.
PartsOfPasses = Mapping[tuple[int, int], Sequence[RowMap]]

_LAYER = re.compile(r"(.*?\.|)([0-9]+)(\..*|)")


def number_ranks(dump: Dump) -> Dump:
    """Assign global numbers to batches, prompt parts, layers and experts. Notes name the kinds of parallelism."""
    if len(dump.ranks) < 2:
        return dump
    tensors = [replace(tensor, world_rank=tensor.site.at.rank) for tensor in dump.tensors]
    dump = replace(dump, tensors=tensors)
    stages = _find_stages(dump)
    if len(stages) > 1:
        dump = _number_layers(dump, stages)
    dump = number_experts(dump)
    groups = _find_groups(dump)
    if len(groups) == 1:
        return dump
    parts = find_parts(dump, groups)
    return _number_parts(dump, groups, parts) if parts else _number_batches(dump, groups)


def _noted(dump: Dump, tensors: Sequence[DumpedTensor], note: str) -> Dump:
    """Return a dump with other tensors, and a note on the reason."""
    return replace(dump, tensors=tensors, notes=[*dump.notes, f"{dump.name}: {note}"])


def _find_groups(dump: Dump) -> list[list[int]]:
    """Return groups of ranks that hold the same tokens; one group if a rank has no ids."""
    passes = [(one.site.at.micro_batch, one.site.at.step) for one in dump.tensors]
    first = min(passes)
    in_first = [
        tensor
        for tensor, at in zip(dump.tensors, passes, strict=True)
        if at == first and tensor.site.at.phase == "forward"
    ]
    groups: list[tuple[Tensor, list[int]]] = []
    for rank in dump.ranks:
        ids = read_ids([one for one in in_first if one.site.at.rank == rank])
        if ids is None:
            return [dump.ranks]
        for known, members in groups:
            if torch.equal(known, ids):
                members.append(rank)
                break
        else:
            groups.append((ids, [rank]))
    members_of = [members for _, members in groups]
    return members_of if len({len(members) for members in members_of}) == 1 else [dump.ranks]


def _places(groups: list[list[int]]) -> dict[int, tuple[int, int]]:
    """Return the group of each rank, and its index in the group."""
    return {
        rank: (group, number)
        for group, members in enumerate(groups)
        for number, rank in enumerate(members)
    }


def _leave_axes(dump: Dump, groups: list[list[int]]) -> list[DumpedTensor]:
    """Collapse the mesh axes along which the groups lie to size 1. The groups become passes."""
    axes = {tensor.site.at.rank: tensor.axes for tensor in dump.tensors}
    firsts = [axes[members[0]] for members in groups]
    left = {
        name: (0, 1) for name in firsts[0] if len({one.get(name) for one in firsts}) == len(groups)
    }
    return [replace(tensor, axes={**tensor.axes, **left}) for tensor in dump.tensors]


def _number_batches(dump: Dump, groups: list[list[int]]) -> Dump:
    places = _places(groups)
    axes = {tensor.site.at.rank: tensor.axes for tensor in dump.tensors}

    def is_sharded(tensor: DumpedTensor) -> bool:
        """Return True for a parameter whose shards lie on several groups, as in FSDP."""
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
        return tensor.moved(micro_batch=at.micro_batch * len(groups) + group, rank=rank)

    pairs = zip(dump.tensors, _leave_axes(dump, groups), strict=True)
    return _noted(
        dump,
        [old if is_sharded(old) else move(new) for old, new in pairs],
        f"{len(groups)} data-parallel groups hold different prompts",
    )


def _number_parts(dump: Dump, groups: list[list[int]], parts: PartsOfPasses) -> Dump:
    """Make each group's part of a prompt a pass. Passes that the groups do not divide stay whole."""
    places = _places(groups)

    def move(tensor: DumpedTensor) -> DumpedTensor:
        at = tensor.site.at
        group, rank = places[at.rank]
        rows = parts.get((at.micro_batch, at.step))
        if rows is None:
            return tensor.moved(step=at.step * len(groups))
        return replace(tensor, rows=rows[group]).moved(
            step=at.step * len(groups) + group, rank=rank
        )

    note = f"{len(groups)} groups of ranks hold different tokens of a prompt"
    return _noted(dump, list(map(move, _leave_axes(dump, groups))), note)


def _find_stages(dump: Dump) -> list[list[int]]:
    """Return the ranks of each pipeline stage in order; a single stage without a pipeline."""
    modules: dict[int, set[str]] = {}
    for tensor in dump.tensors:
        modules.setdefault(tensor.site.at.rank, set()).add(tensor.site.at.module)
    stages: dict[frozenset[str], list[int]] = {}
    for rank, names in sorted(modules.items()):
        stages.setdefault(frozenset(names), []).append(rank)
    ordered = list(stages.values())
    outside = [{name for name in names if not _LAYER.fullmatch(name)} for names in stages]
    # In a pipeline, only the first stage has the embedding, and only the last the head.
    is_pipeline = len(ordered) > 1 and outside[0] - outside[-1] and outside[-1] - outside[0]
    return ordered if is_pipeline else [sorted(modules)]


def _number_layers(dump: Dump, stages: list[list[int]]) -> Dump:
    """Assign global layer numbers. Drop tensors that one stage passes to the next."""
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
    kept: list[DumpedTensor] = []

    def place(tensor: DumpedTensor) -> tuple[int, ...]:
        at = tensor.site.at
        return at.micro_batch, at.step, stage_of[at.rank], tensor.order

    for tensor in sorted(dump.tensors, key=place):
        at = tensor.site.at
        stage = stage_of[at.rank]
        of_module = holders.get(at.module, {stage})
        is_input = tensor.site.port.startswith("input.")
        if len(of_module) > 1 and stage != (min(of_module) if is_input else max(of_module)):
            continue  # a value passed between stages, under the name of the whole module
        module = _add_to_layer(at.module, offsets[stage])
        rank = stages[stage].index(at.rank)
        kept.append(replace(tensor.moved(module=module, rank=rank), order=len(kept)))
    return _noted(dump, kept, f"{len(stages)} pipeline stages hold different layers")


def _add_to_layer(module: str, offset: int) -> str:
    found = _LAYER.fullmatch(module)
    return f"{found[1]}{int(found[2]) + offset}{found[3]}" if found and offset else module


_EXPERT = re.compile(r"(.*\bexperts\.)([0-9]+)(\..*|)")
_AXES = ("moe_ep", "ep")


@dataclass(slots=True)
class _NumberedExperts:
    """The experts of one layer."""

    numbers: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the experts on each rank."""
    axes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index of each rank along the expert-parallel axis, and the size of the axis."""

    def offsets(self, num_routed: int) -> Mapping[int, int]:
        """Return the offset of each rank's numbers; empty if the numbers are global.

        num_routed: number of experts that the router chooses from; 0 if unknown.
        """
        own = next(iter(self.numbers.values()))
        if len(self.numbers) < 2 or any(other != own for other in self.numbers.values()):
            return {}
        if len(self.axes) == len(self.numbers):
            return {rank: place * len(own) for rank, (place, _) in self.axes.items()}
        if num_routed != len(own) * len(self.numbers):
            return {}
        return {rank: place * len(own) for place, rank in enumerate(sorted(self.numbers))}


def number_experts(dump: Dump) -> Dump:
    """Assign global numbers to experts that each rank counts from 0.

    Either the dump declares the expert-parallel axis, or the router has as many scores as all ranks together
    have experts. With fewer scores, every rank holds a part of every expert.
    """
    layers: dict[str, _NumberedExperts] = {}
    routed: dict[str, int] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        parent, _, name = at.module.rpartition(".")
        if found := _EXPERT.fullmatch(at.module):
            layer = layers.setdefault(found[1], _NumberedExperts())
            layer.numbers.setdefault(at.rank, set()).add(int(found[2]))
            axis = next((tensor.axes[one] for one in _AXES if one in tensor.axes), (0, 1))
            if axis[1] > 1:
                layer.axes[at.rank] = axis
        elif name in ROUTERS and tensor.site.port in ("output", "output.0") and tensor.shape:
            routed[f"{parent}.experts."] = tensor.shape[-1]
    offsets = {name: layer.offsets(routed.get(name, 0)) for name, layer in layers.items()}

    def move(tensor: DumpedTensor) -> DumpedTensor:
        found = _EXPERT.fullmatch(tensor.site.at.module)
        offset = offsets.get(found[1], {}).get(tensor.site.at.rank, 0) if found else 0
        if not found or not offset:
            return tensor
        return tensor.moved(module=f"{found[1]}{int(found[2]) + offset}{found[3]}")

    shared = max((len(one) for one in offsets.values()), default=0)
    if not shared:
        return dump
    note = f"its experts are numbered on each of {shared} ranks"
    return _noted(dump, list(map(move, dump.tensors)), note)


def find_parts(dump: Dump, groups: Sequence[Sequence[int]]) -> PartsOfPasses:
    """Return the rows of each group, for passes that the groups divide (context parallelism).

    Returns: an empty mapping if every group has its own prompts, which begin at position 0.
    """
    passes: dict[tuple[int, int], dict[int, list[DumpedTensor]]] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        if at.phase == "forward":
            of_rank = passes.setdefault((at.micro_batch, at.step), {})
            of_rank.setdefault(at.rank, []).append(tensor)
    found = {}
    for key, of_rank in sorted(passes.items()):
        if any(members[0] not in of_rank for members in groups):
            continue
        rows = _read_rows([of_rank[members[0]] for members in groups], key[0])
        if rows is not None and len({one.positions for one in rows}) > 1:
            found[key] = rows
    first = found.get(min(passes, default=(0, 0)))
    if first is None or all(any(0 in held for held in one.positions) for one in first):
        return {}
    return found


def _read_rows(parts: Sequence[list[DumpedTensor]], batch: int) -> list[RowMap] | None:
    """Return the rows of each group's first rank, as recorded or from the layout of the ids."""
    recorded = [next((one.rows for one in part if one.rows is not None), None) for part in parts]
    if all(recorded):
        return [one for one in recorded if one is not None]
    ids = [read_ids(part) for part in parts]
    shapes = [(one.shape[0], one.shape[1]) for one in ids if one is not None]
    if len(shapes) < len(parts):
        return None
    known = [read_positions(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    positions = [one for one in known if one is not None]
    if len(positions) < len(parts):
        positions = _declared_positions(parts, shapes)
    prompts = [tuple(batch * shape[0] + row for row in range(shape[0])) for shape in shapes]
    return [
        RowMap(names, tuple(map(tuple, rows)))
        for names, rows in zip(prompts, positions, strict=False)
    ] or None


def _declared_positions(
    parts: Sequence[list[DumpedTensor]], shapes: Sequence[tuple[int, int]]
) -> list[list[list[int]]]:
    """Return the positions of each part by the declared layout of the ids; none without a layout."""
    tensors = [
        next((one for one in part if one.layout and one.site.port.endswith("ids")), None)
        for part in parts
    ]
    held = [one for one in tensors if one is not None and one.shape is not None]
    if len(held) < len(parts):
        return []
    try:
        placement = place_declared(held, [one.shape or () for one in held])
    except LayoutError:
        return []
    if placement is None:
        return []
    whole = arange(placement.shape[-1])
    return [
        [one_slice.cut(whole).tolist()] * shape[0]
        for one_slice, shape in zip(placement.slices, shapes, strict=True)
    ]


def find_cut_off(dump: Dump) -> list[str]:
    """Return a problem for each rank whose last pass ends before the point where earlier passes end.

    An evaluation after training has no backward, so it ends early too. A dump that records its end is exempt,
    and so is one without an order.
    """
    if dump.is_finished or not dump.is_ordered:
        return []
    by_rank: dict[int, list[DumpedTensor]] = {}
    for tensor in sorted(dump.tensors, key=lambda one: one.order):
        by_rank.setdefault(tensor.site.at.rank, []).append(tensor)
    return [
        f"the run was cut off in {f'rank {at.rank}, ' if at.rank else ''}step {at.step}: its last"
        f" results are those of {at.module or '(model)'}"
        for tensors in by_rank.values()
        if _is_cut_off(tensors)
        for at in [tensors[-1].site.at]
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
    kinds = set(map(without_numbers, finished))
    parts = module.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(one not in finished and without_numbers(one) in kinds for one in around)


# The values of this many ports are read. The majority decides.
_MOST_PLACES = 9


def find_lost_ranks(expected: Dump, actual: Dump) -> set[int]:
    """Return the ranks that only EXPECTED holds, if the other ranks hold the same parts on both sides.

    A run on fewer ranks holds whole tensors, sums or larger parts instead.
    """
    kept, lost = set(actual.ranks), set(expected.ranks) - set(actual.ranks)
    if not lost or not kept <= set(expected.ranks):
        return set()
    votes: list[bool] = []
    others = collect_series(actual)
    for port, series in collect_series(expected).items():
        # The first call, on all ranks.
        both = [next(iter(one.tensors.values())) for one in (series, others.get(port)) if one]
        if len(both) < 2 or len(both[0]) <= len(both[1]):
            continue
        shapes = {one.site.at.rank: one.shape for one in both[0]}
        if any(one.shape != shapes.get(one.site.at.rank) for one in both[1]):
            return set()
        if len(votes) < _MOST_PLACES and "float" in series.first.dtype:
            votes += _vote(both[0], both[1])
    return lost if sum(votes) * 2 > len(votes) else set()


def _vote(parts: Sequence[DumpedTensor], others: Sequence[DumpedTensor]) -> list[bool]:
    """Return [True] if a value is nearer to the value of its own rank than to the sum; [] for replicas."""
    values = {
        one.site.at.rank: value.double()
        for one in parts
        if (value := one.read_intact()) is not None
    }
    other = others[0].read_intact()
    if other is None or len(values) < len(parts):
        return []
    if len({one.shape for one in values.values()}) > 1:
        return [True]
    own = values[others[0].site.at.rank]
    if all(torch.equal(one, own) for one in values.values()):
        return []
    total = torch.stack([*values.values()]).sum(0)
    return [_distance(other.double(), own) < _distance(other.double(), total)]


def _distance(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other))


# One module, such as a saturated gate, may compute equal values from different inputs. Three do not.
_FEWEST_MODULES = 3
# An output with fewer distinct values may be constant by nature, such as zeros or a one-hot choice.
_FEWEST_VALUES = 5

_Pair = tuple[Pass, Pass]


def find_reused_buffers(dump: Dump) -> list[DumpedTensor]:
    """Return the outputs that are bitwise equal in decode steps with different tokens or inputs.

    A captured graph writes every step to the same memory. A tool that keeps references, or that records
    only during capture, then dumps one step under the names of all steps.

    To save time, only the first and last pair of decode steps of each request are searched.
    """
    series_of = {
        port: series for port, series in collect_series(dump).items() if port.phase == "forward"
    }
    outputs = [
        series
        for port, series in series_of.items()
        if port.direction == "output" and "float" in series.first.dtype
    ]
    found: dict[str, DumpedTensor] = {}
    for pairs in _list_decode_pairs(find_passes(dump)):
        telling = [pair for pair in pairs if _have_different_ids(*pair)] or pairs
        for one, other in dict.fromkeys((*telling[:1], *telling[-1:])):
            repeated = [series for series in outputs if _is_same(series, one, other)]
            if repeated and _is_evidence(series_of, (one, other), repeated):
                steps = dict.fromkeys(each for pair in pairs for each in pair)
                for series in repeated:
                    same = [each for each in steps if _is_same(series, each, other)]
                    found |= {
                        str(held.site): held for each in same for held in series.held_in(each)
                    }
    return list(found.values())


def describe_reused(reused: Sequence[DumpedTensor]) -> list[str]:
    """Return one problem for all reused buffers, or an empty list."""
    if not reused:
        return []
    steps = sorted({one.site.at.step for one in reused})
    modules = list(dict.fromkeys(one.site.at.module or "(model)" for one in reused))
    text = (
        f"the same values in steps {', '.join(map(str, steps))}, though their tokens differ: a buffer was"
        f" reused, as by a captured graph ({format_count(len(modules), 'module')}: {name_some(modules)})"
    )
    return [text]


def _list_decode_pairs(passes: Sequence[Pass]) -> Iterator[list[_Pair]]:
    """Yield the pairs of successive decode steps of each request."""
    pairs: list[_Pair] = []
    has_begun = False
    for one, following in pairwise(passes):
        lengths = [each.rows.length if each.rows else 0 for each in (one, following)]
        if one.batch != following.batch or lengths[1] != 1:
            yield pairs
            pairs, has_begun = [], False
        elif lengths[0] > 1:
            has_begun = True
        elif has_begun and one.shape == following.shape:
            pairs.append((one, following))
    yield pairs


def _have_different_ids(one: Pass, other: Pass) -> bool:
    return one.ids is not None and other.ids is not None and not torch.equal(one.ids, other.ids)


def _is_same(series: Series, one: Pass, other: Pass, fewest_values: int = _FEWEST_VALUES) -> bool:
    """Return True if a port holds equal values in two passes on all ranks."""
    sides = series.held_in(one), series.held_in(other)
    return len(sides[0]) == len(sides[1]) > 0 and all(
        _are_equal(*both, fewest_values) for both in zip(*sides, strict=True)
    )


def _are_equal(one: DumpedTensor, other: DumpedTensor, fewest_values: int) -> bool:
    if one.shape != other.shape or one.has_values != other.has_values:
        return False
    if not one.has_values:
        known = one.statistics
        return known == other.statistics and known.get("max") != known.get("min")
    return one.holds_equal(other) and len(one.read().double().unique()) >= fewest_values


def _is_evidence(series_of: SeriesByPort, pair: _Pair, repeated: Sequence[Series]) -> bool:
    """Return True if several modules, or the logits, have equal results for different inputs."""
    have_different_ids = _have_different_ids(*pair)
    if have_different_ids and any(series.port.level == "logits" for series in repeated):
        return True
    found = set()
    for series in repeated:
        inputs = [
            other
            for port, other in series_of.items()
            if (port.module, port.direction) == (series.port.module, "input")
            and other.held_in(pair[0])
        ]
        # If its inputs repeat too, as in an encoder, a module rightly repeats its result.
        is_explained = all(_is_same(one, *pair, fewest_values=0) for one in inputs)
        if not is_explained or (have_different_ids and not inputs):
            found.add(series.port.module)
    if len(found) >= _FEWEST_MODULES:
        return True
    # Attention sees one more token in each step, so some result must differ.
    modules = {series.port.module for series in repeated}
    return (
        len(modules) >= _FEWEST_MODULES
        and any("att" in module.lower() for module in modules)
        and all(
            _is_same(series, *pair, fewest_values=0)
            for port, series in series_of.items()
            if port.direction == "output" and series.held_in(pair[0])
        )
    )


def leave_out_reused(dump: Dump) -> Dump:
    """Drop tensors that hold the values of another step, and report them as a problem."""
    reused = find_reused_buffers(dump)
    dropped = {one.site for one in reused}
    return replace(
        dump,
        tensors=[one for one in dump.tensors if one.site not in dropped],
        problems=[*dump.problems, *describe_reused(reused)],
    )
