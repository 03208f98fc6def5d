"""Dumps of one run as ranks of a parallel run would write them, in assay's format and in SGLang's.

The model runs once. Every tensor is then cut as the placement of its module says; summands are computed
from the parts of the weights that a rank holds.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import assay
from assay.dumps.recognizing import open_dump
from assay.models import load_model
from assay.sites import Call, CallSite, RowMap
from assay.trace import TraceWriter

Format = Literal["assay", "sglang"]

# Modules of Llama and Mixtral whose output features, or input features, are divided over ranks.
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW = ("o_proj", "down_proj")
ELEMENTWISE = ("act_fn",)
KEY_VALUE = ("k_proj", "v_proj")
NUM_KEY_VALUE_HEADS = 2

_LAYER = re.compile(r"model\.layers\.(\d+)(.*)")
_NUM_LAYERS = 2
_NUM_EXPERTS = 4


@dataclass(frozen=True)
class Value:
    """One tensor on one rank. split: the mesh axis of each divided dim, by dim from the end."""

    at: CallSite
    port: str
    value: Tensor
    rows: RowMap | None = None
    split: dict[int, str] = field(default_factory=dict)
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the last part of the module's path."""
        return self.at.module.rpartition(".")[2]

    def on(self, rank: int, axis: str, size: int, **changes: Any) -> "Value":
        """Return it on a rank; changes: of its fields."""
        axes = {axis: (rank, size)}
        return replace(self, at=replace(self.at, rank=rank), axes=axes, **changes)

    def chunk(self, rank: int, axis: str, size: int, dim: int) -> "Value":
        """Return a rank's chunk along a dim."""
        value = self.value.chunk(size, dim)[rank].contiguous()
        return self.on(rank, axis, size, value=value, split={dim: axis})

    @property
    def dims(self) -> str:
        """Return the layout in the notation of SGLang's dumper."""
        names = {1: "h", 2: "t h", 3: "b s h", 4: "b n s d"}[self.value.ndim].split()
        if self.port.endswith("ids"):
            names = ["b", "s"]
        for dim, axis in self.split.items():
            names[dim] += f"[{axis}]"
        return " ".join(names)


@dataclass(frozen=True)
class Recorded:
    """A run: its model, and the tensors of all calls in the order in which they finished."""

    model: nn.Module
    values: list[Value]

    def module(self, path: str) -> Any:
        return self.model.get_submodule(path)


Spread = Callable[[Recorded, Value], Iterator[Value]]


def make_model(name: str) -> Any:
    """Return the first two layers of a model."""
    model: Any = load_model(name, dtype="float32").model
    model.model.layers = model.model.layers[:_NUM_LAYERS]
    model.config.num_hidden_layers = _NUM_LAYERS
    return model


def record(model: Any, folder: Path, *, parameters: bool = False) -> Recorded:
    """Run a generation of two prompts, and return what every module was given and returned."""
    ids = torch.tensor([[3, 250, 41, 131, 77, 201, 9, 160], [17, 140, 222, 90, 5, 199, 64, 180]])
    with assay.capture(model, folder):
        model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=258)
    dump = open_dump(folder)
    values = [
        Value(one.site.at, one.site.port, one.read().clone(), one.rows)
        for one in dump.tensors
        if not one.site.port.startswith("changed.")
    ]
    if parameters:
        for name, parameter in model.named_parameters():
            path, _, own = name.rpartition(".")
            values.append(Value(CallSite(0, path), f"parameter.{own}", parameter.detach()))
    return Recorded(model, values)


def single(run: Recorded, value: Value) -> Iterator[Value]:
    """Leave everything on one rank."""
    yield value


def tensor_parallel(size: int, *, partial: bool = False) -> Spread:
    """Divide heads, features and the vocabulary. partial: leave sums to what comes after."""

    def spread(run: Recorded, one: Value) -> Iterator[Value]:
        for rank in range(size):
            dim = _divided_dim(one)
            if one.name in KEY_VALUE and dim in (-1, -2) and size > NUM_KEY_VALUE_HEADS:
                # Every head is on several ranks, which no notation for dims can say.
                head = rank * NUM_KEY_VALUE_HEADS // size
                part = one.value.chunk(NUM_KEY_VALUE_HEADS, dim)[head].contiguous()
                yield one.on(rank, "tp", size, value=part, split={-9: "tp"})
            elif dim is not None:
                yield one.chunk(rank, "tp", size, dim)
            elif partial and one.port == "output" and one.name in (*ROW, "embed_tokens"):
                value = _summand(run, one, rank, size)
                yield one.on(rank, "tp", size, value=value, split={-1: "tp:partial"})
            else:
                yield one.on(rank, "tp", size)

    return spread


def _divided_dim(one: Value) -> int | None:
    name, port = one.name, one.port
    if name == "embed_tokens" or name in COLUMN:
        # Rows of a weight are output features; of the embedding's weight they are tokens.
        if port == "parameter.weight":
            return -2
        return -1 if port == "output" and name in COLUMN else None
    if name in ROW and port in ("parameter.weight", "input.input"):
        return -1
    return -1 if name in ELEMENTWISE else None


def _summand(run: Recorded, one: Value, rank: int, size: int) -> Tensor:
    module: nn.Embedding | nn.Linear = run.module(one.at.module)
    given = next(v.value for v in run.values if v.at == one.at and v.port.startswith("input"))
    if one.name == "embed_tokens":
        rows: int = module.weight.shape[0] // size
        held = (given >= rank * rows) & (given < (rank + 1) * rows)
        return one.value * held[..., None].to(one.value.dtype)
    parts = given.chunk(size, -1)[rank], module.weight.chunk(size, 1)[rank]
    summand: Tensor = parts[0] @ parts[1].T
    return summand.detach()


def expert_parallel(size: int) -> Spread:
    """Give every rank some experts; each adds what its experts return."""

    def spread(run: Recorded, one: Value) -> Iterator[Value]:
        for rank in range(size):
            if one.name == "experts" and one.port == "output":
                value = _expert_summand(run, one, rank, size)
                yield one.on(rank, "moe_ep", size, value=value, split={-1: "moe_ep:partial"})
            elif one.name == "experts" and one.port.startswith("parameter."):
                yield one.chunk(rank, "moe_ep", size, -3)
            else:
                yield one.on(rank, "moe_ep", size)

    return spread


def _expert_summand(run: Recorded, one: Value, rank: int, size: int) -> Tensor:
    given = {v.port: v.value for v in run.values if v.at == one.at}
    experts = run.module(one.at.module)
    own = experts.num_experts // size
    indices = given["input.top_k_index"]
    weights = given["input.top_k_weights"] * (indices // own == rank)
    with torch.no_grad():
        summand: Tensor = experts(given["input.hidden_states"], indices, weights)
    return summand


def pipeline(*, local: bool) -> Spread:
    """Give the second of two ranks the second half of the layers. local: count from 0 on each."""

    def spread(run: Recorded, one: Value) -> Iterator[Value]:
        found = _LAYER.fullmatch(one.at.module)
        layer = int(found[1]) if found else None
        first = (layer is not None and layer < _NUM_LAYERS // 2) or one.name == "embed_tokens"
        is_shared = one.name == "rotary_emb" or one.at.module in ("", "model")
        module = one.at.module
        if local and found and not first:
            module = f"model.layers.{int(found[1]) - _NUM_LAYERS // 2}{found[2]}"
        for rank in (0, 1):
            if is_shared or rank == (0 if first else 1):
                moved = one.on(rank, "pp", 2)
                yield replace(moved, at=replace(moved.at, module=module))

    return spread


def data_parallel(run: Recorded, one: Value) -> Iterator[Value]:
    """Give each of two ranks one of the two prompts."""
    for rank in range(2):
        if one.port.startswith("parameter.") or one.value.shape[0] == 1:
            yield one.on(rank, "dp", 2, rows=_rows(one, rank))
        else:
            part = one.chunk(rank, "dp", 2, -one.value.ndim)
            yield replace(part, rows=_rows(one, rank), split={})


def _rows(one: Value, rank: int) -> RowMap | None:
    rows = one.rows
    return RowMap((rows.prompts[rank],), (rows.positions[rank],)) if rows is not None else None


def context_parallel(size: int, *, zigzag: bool) -> Spread:
    """Divide the tokens of prefills. zigzag: each rank has one chunk from each end."""

    def spread(run: Recorded, one: Value) -> Iterator[Value]:
        length = one.rows.length if one.rows else 1
        dims = [dim for dim, size in enumerate(one.value.shape[:2]) if size == length]
        for rank in range(size):
            numbers = torch.arange(length).chunk(2 * size)
            held = (rank, 2 * size - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)
            kept = torch.cat([numbers[number] for number in held]) if length > 1 else numbers[0]
            rows = one.rows and RowMap(
                one.rows.prompts, tuple(tuple(p[n] for n in kept) for p in one.rows.positions)
            )
            is_last = one.name == "lm_head" or one.port == "output.logits"
            if is_last and length - 1 not in kept:
                continue  # the rank of the last token computes its logits
            if length == 1 or one.port.startswith("parameter.") or not dims:
                yield one.on(rank, "cp", size, rows=rows)
                continue
            dim = dims[-1]
            axis = "cp:zigzag" if zigzag else "cp"
            value = one.value.index_select(dim, kept)
            yield one.on(
                rank, "cp", size, value=value, rows=rows, split={dim - one.value.ndim: axis}
            )

    return spread


def split_experts(run: Recorded) -> Recorded:
    """Return the run as a model would record it that has a module for every expert."""
    values = []
    for one in run.values:
        if one.name != "experts" or one.port.startswith("parameter."):
            values.append(one)
            continue
        if one.port == "output":
            values += _experts_of(run, one)
    return Recorded(run.model, values)


def _experts_of(run: Recorded, one: Value) -> Iterator[Value]:
    given = {v.port: v.value for v in run.values if v.at == one.at}
    experts = run.module(one.at.module)
    for number in range(experts.num_experts):
        chosen = (given["input.top_k_index"] == number).any(-1)
        hidden = given["input.hidden_states"][chosen]
        gate, up = (hidden @ experts.gate_up_proj[number].T).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[number].T
        at = replace(one.at, module=f"{one.at.module}.{number}")
        for port, value in (("input.hidden_states", hidden), ("output", result)):
            yield replace(one, at=at, port=port, value=value.detach())


def experts_over_ranks(size: int, *, local: bool) -> Spread:
    """Give every rank some expert modules. local: count from 0 on each."""

    def spread(run: Recorded, one: Value) -> Iterator[Value]:
        path, _, number = one.at.module.partition(".experts.")
        own = _NUM_EXPERTS // size
        for rank in range(size):
            moved = one.on(rank, "moe_ep", size)
            if not number:
                yield moved
            elif int(number) // own == rank:
                name = int(number) % own if local else number
                yield replace(moved, at=replace(moved.at, module=f"{path}.experts.{name}"))

    return spread


LAYOUTS: dict[str, Spread] = {
    "tp=1": single,
    "tp=2": tensor_parallel(2),
    "tp=4": tensor_parallel(4),
    "tp=2 partial": tensor_parallel(2, partial=True),
    "pp=2": pipeline(local=False),
    "pp=2 local": pipeline(local=True),
    "dp=2": data_parallel,
}


def spread_values(run: Recorded, spread: Spread) -> list[Value]:
    return [part for one in run.values for part in spread(run, one)]


def write(values: Iterable[Value], folder: Path, form: Format, *, declared: bool = True) -> Path:
    """Write values of all ranks. declared: with their layouts."""
    (_write_sglang if form == "sglang" else _write_assay)(list(values), folder, declared=declared)
    return folder


def _is_declarable(one: Value) -> bool:
    return -9 not in one.split


def _write_assay(values: list[Value], folder: Path, *, declared: bool) -> None:
    calls: dict[CallSite, list[Value]] = {}
    for one in values:
        calls.setdefault(one.at, []).append(one)
    with TraceWriter(folder, {"model": "parallel"}) as writer:
        for order, (at, held) in enumerate(calls.items()):
            placements = {one.port: one.dims for one in held if declared and _is_declarable(one)}
            call = Call(at, "", None, order, rows=held[0].rows, placements=placements)
            writer.add(call, {one.port: one.value for one in held})


def _write_sglang(values: list[Value], folder: Path, *, declared: bool) -> None:
    run = folder / "run"
    run.mkdir(parents=True)
    for index, one in enumerate(values):
        module = f"{one.at.module}." if one.at.module else ""
        if one.port.startswith("parameter."):
            name = f"param__{module}{one.port.removeprefix('parameter.')}"
        else:
            name = f"non_intrusive__{module}{one.port.replace('input.', 'inputs.', 1)}"
        keys = {"step": one.at.step, "rank": one.at.rank, "dump_index": index, "name": name}
        info = {
            f"{axis}_{kind}": number
            for axis, place in one.axes.items()
            for kind, number in zip(("rank", "size"), place, strict=True)
        }
        meta = {**keys, "sglang_parallel_info": info}
        if declared and _is_declarable(one):
            meta["dims"] = one.dims
        file = "___".join(f"{key}={item}" for key, item in keys.items()) + ".pt"
        torch.save({"value": one.value.clone(), "meta": meta}, run / file)
