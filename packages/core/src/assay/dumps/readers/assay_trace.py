"""Traces and goldens of assay itself.

A golden has one trace for each candidate dtype: a run of the yardstick with the inputs of every module
rounded to that dtype. The widest is read. A training golden also holds the values between the phases of
each step.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from assay.dtypes import FORMATS
from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError, Statistic
from assay.errors import name_some
from assay.files import UnreadableFileError, open_file, read_json_object
from assay.sites import Call, CallSite, Phase, Site
from assay.trace import Trace, TraceError
from assay.trace.index import attachment_file, shard_file

_HEAD, _HEAD_BYTES = b'"format":"assay-trace"', 64
# Trace folders of a training golden, and of other goldens by dtype, widest first.
_TRACES_IN_GOLDEN = (("trace",), tuple(FORMATS))
# The attachment of a training trace that lists the tensors of a step.
_STEP_TABLE = re.compile(r"(step-(\d+))-table")
_RANK = re.compile(r"rank-(\d{1,6})")
# The manifest key for a sentence on calls that were not recorded.
_LEFT_OUT = "left_out"
# The elements of a tensor of statistics, in the order of `assay.recording.recorders.NAMES`.
_STATISTICS: tuple[Statistic, ...] = (
    "min", "max", "mean", "norm", "nan", "inf", "projection", "channels",
)  # fmt: skip
_ADVICE = "Copy the trace again, or capture it again"
# Prefix of optimizer counters. Optimizers count different things.
_COUNT = "count-"
_MEASURED = ".statistics"
# A port with the error of the same run in another dtype.
_NOISE = re.compile(r"(.+)\.noise\.(\w+)")


class AssayReader:
    """Reader of traces (`assay.capture`), goldens (`assay capture`) and the folders of checks."""

    name = "assay"

    def recognize(self, path: Path) -> bool:
        """Return True for a trace, the traces of several ranks, a golden, or the folder of a check."""
        return bool(_find_traces(path) or _find_ranks(path))

    def open(self, path: Path, model_name: str | None = None) -> Dump:
        """Read the index of the trace or of all ranks' traces.

        model_name: one of several captured models, such as "Llama" or "2-Llama". None for the first;
            the others are then a problem.
        """
        models = _find_models(path)
        if model_name is not None:
            found = [one for one in models if model_name in (one, one.partition("-")[2])]
            if len(found) != 1:
                held = ", ".join(models) or "one model"
                raise DumpError(
                    f"--model-name {model_name} names none or several in {path}: {held}"
                )
            path = models[found[0]]
        ranks = _find_ranks(path)
        dump = self._join(path, ranks) if ranks else self._open_one(path)
        problems = list(dump.problems)
        if ranks and _is_trace(path):
            problems.append(f"{path}: the trace of a process without ranks was not read")
        if len(models) > 1 and model_name is None:
            problems.append(f"{path}: compare each model: --model-name {name_some(list(models))}")
        return replace(dump, problems=problems)

    def _open_one(self, path: Path) -> Dump:
        folder, *others = _find_traces(path)
        damaged = DamagedFiles()
        try:
            trace = Trace.open_index(folder)
            if changes := trace.find_changes():
                raise TraceError.changed(folder, changes, _ADVICE)
            lost = trace.find_lost()
            found = [*_recorded(trace, lost), *_attached(trace, lost)]
            damaged.problems += _describe_lost(trace, lost)
            if trace.calls and not found:
                raise next(iter(lost.values()))
        except TraceError as error:
            raise DumpError(str(error)) from None
        if not trace.calls and not trace.complete:
            raise DumpError(f"{folder}: the run was cut off before its first call was written")
        if not trace.calls:
            raise DumpError(f"{folder} holds no recorded module calls: capture with --level module")
        if any(tensor.site.at.phase == "backward" for tensor in found):
            found.sort(key=lambda tensor: tensor.site.at.step)
        provenance = _provenance(trace)
        if others:
            provenance["trace"] = f"{folder.name}; not read: {', '.join(o.name for o in others)}"
        if not trace.complete:
            cut_off = f"{folder}: the run was cut off, its last calls are missing"
            damaged.problems.append(cut_off)
        if _LEFT_OUT in trace.manifest:
            damaged.problems.append(f"{folder}: {trace.manifest[_LEFT_OUT]}")
        return replace(
            Dump.of_found(self.name, path, found, damaged, provenance),
            rounded_to=str(trace.manifest.get("dtype") or ""),
            is_finished=trace.complete,
        )

    def _join(self, path: Path, folders: Mapping[int, Path]) -> Dump:
        """Join the dumps of all ranks. An unreadable rank becomes a problem of the dump."""
        dumps, damaged = [], DamagedFiles()
        for rank, folder in folders.items():
            try:
                dumps.append(self._open_one(folder))
            except (DumpError, UnreadableFileError) as error:
                damaged.problems.append(f"rank {rank}: {error}")
        if not dumps:
            raise DumpError(f"{path}: no rank can be read: {name_some(damaged.problems)}")
        found = [tensor for dump in dumps for tensor in dump.tensors]
        sizes = [int(dump.provenance.get("world_size", 0)) for dump in dumps]
        missing = [rank for rank in range(max(sizes)) if rank not in folders]
        damaged.problems += [f"rank {rank} is missing" for rank in missing]
        damaged.problems += [problem for dump in dumps for problem in dump.problems]
        whole = Dump.of_found(self.name, path, found, damaged, dumps[0].provenance)
        return replace(whole, is_finished=all(dump.is_finished for dump in dumps))


def _find_models(path: Path) -> dict[str, Path]:
    """Return the folders of captured models by name. Of a capture, the first model has `path` itself."""
    found = {
        folder.name: folder
        for folder in sorted(path.glob("*-*"))
        if not _RANK.fullmatch(folder.name) and (_is_trace(folder) or _find_ranks(folder))
    }
    for folder in (path, *_find_ranks(path).values()) if found else ():
        if _is_trace(folder):
            first = _text_at(read_json_object(folder / "manifest.json"), "manifest", "model")
            return {f"1-{first}": path} | found
    return found


def _find_ranks(path: Path) -> dict[int, Path]:
    folders = {
        int(found[1]): folder
        for folder in (path.glob("rank-*") if path.is_dir() else ())
        if (found := _RANK.fullmatch(folder.name)) and _is_trace(folder)
    }
    return dict(sorted(folders.items()))


def _find_traces(path: Path) -> list[Path]:
    """Return the trace folders in `path`, the preferred one first."""
    for root in (path, path / "golden"):
        for names in (("",), *_TRACES_IN_GOLDEN):
            if found := [root / name for name in names if _is_trace(root / name)]:
                return found
    return []


def _is_trace(folder: Path) -> bool:
    file = folder / "manifest.json"
    if not file.is_file():
        return False
    with open_file(file) as stream:
        return _HEAD in stream.read(_HEAD_BYTES)


def _describe_lost(trace: Trace, lost: Mapping[str, object]) -> Iterator[str]:
    """Yield a problem for each lost file, with the tensors in it."""
    places: dict[str, list[str]] = {name: [] for name in lost}
    for call in trace.calls:
        for port in call.ports:
            if _is_lost(trace, lost, call, port):
                name = shard_file(trace.stored(call, port).shard)
                places[name].append(str(Site(call.site, port)))
    for name, sites in places.items():
        named = f"; lost: {name_some(sites)}" if sites else ""
        yield f"{trace.folder.name}/{name} is missing or cut off{named}"


def _is_lost(trace: Trace, lost: Mapping[str, object], call: Call, port: str) -> bool:
    is_damaged = bool(lost) and shard_file(trace.stored(call, port).shard) in lost
    return is_damaged and not trace.is_stored(call, port)


def _recorded(trace: Trace, lost: Mapping[str, object]) -> Iterator[DumpedTensor]:
    axes = _read_axes(trace)
    for call in _by_end(trace.calls):
        ports = [one for one in call.ports if not _is_lost(trace, lost, call, one)]
        noise = _read_noise(trace, call, ports)
        for port in ports:
            if _NOISE.fullmatch(port):
                continue
            site, load = Site(call.site, port), partial(_read, trace, call, port)
            stored = trace.stored(call, port)
            tensor = DumpedTensor(
                site,
                str(site),
                load,
                class_name=call.class_name,
                dtype=stored.dtype,
                shape=stored.shape,
                layout=call.placements.get(port, ""),
                axes=axes,
                noise=noise.get(port, {}),
                rows=call.rows,
            )
            if port.endswith(_MEASURED) and stored.shape == (len(_STATISTICS),):
                tensor = replace(
                    tensor,
                    site=Site(call.site, port.removesuffix(_MEASURED)),
                    dtype=str(call.constants.get(f"{port.removesuffix(_MEASURED)}.dtype", "")),
                    shape=None,
                    statistics=dict(zip(_STATISTICS, load().tolist(), strict=True)),
                    load=None,
                )
            yield tensor


def _read_noise(
    trace: Trace, call: Call, ports: Iterable[str]
) -> dict[str, dict[str, tuple[float, float, int]]]:
    found: dict[str, dict[str, tuple[float, float, int]]] = {}
    for port in ports:
        if parts := _NOISE.fullmatch(port):
            values = _read(trace, call, port).flatten().tolist()
            if len(values) != 3:
                raise TraceError.damaged(trace.folder, str(Site(call.site, port)), str(values))
            found.setdefault(parts[1], {})[parts[2]] = values[0], values[1], int(values[2])
    return found


def _read(trace: Trace, call: Call, port: str) -> Tensor:
    try:
        return trace.intact_tensor(call, port)
    except TraceError as error:
        raise UnreadableFileError(str(error)) from None


def _by_end(calls: Iterable[Call]) -> Iterator[Call]:
    """Reorder calls from start order to end order.

    A call ends after the calls that it made. Backward visits them in reverse.
    """
    passes: dict[tuple[int, int, int], list[Call]] = {}
    for call in calls:
        key = call.site.rank, call.site.micro_batch, call.site.step
        passes.setdefault(key, []).append(call)
    for calls_of_pass in passes.values():
        running: list[Call] = []
        for call in calls_of_pass:
            if call.site.phase != "backward":
                while running and running[-1].site.module != call.caller:
                    yield running.pop()
                running.append(call)
        yield from reversed(running)
        yield from (call for call in reversed(calls_of_pass) if call.site.phase == "backward")


def _attached(trace: Trace, lost: Mapping[str, object]) -> Iterator[DumpedTensor]:
    """Yield the values between the phases of training steps: losses, gradients, updates."""
    axes = _read_axes(trace)
    recorded = trace.manifest.get("rank")
    rank = recorded if isinstance(recorded, int) else 0
    for name in trace.attachments:
        if (found := _STEP_TABLE.fullmatch(name)) and attachment_file(name, "json") not in lost:
            table: Any = trace.attachment_json(name)
            if not trace.is_intact(trace.attached_as(name, "json")):
                raise TraceError.changed(trace.folder, [f"{name}: the list of its values"], _ADVICE)
            try:
                parts = table.get("attachments", [found[1]])
                if any(attachment_file(part, "tensors") in lost for part in parts):
                    continue
                values = {key: one for part in parts for key, one in trace.attachment(part).items()}
                sites = [
                    (
                        _parse_site(row, int(found[2]), rank),
                        values[str(row["tensor"])],
                        str(row.get("layout", "")),
                    )
                    for row in table["values"]
                    if not row["port"].startswith(_COUNT)
                ]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise TraceError.damaged(trace.folder, name, repr(error)) from None
            intact = cache(partial(_are_intact, trace, tuple(parts)))
            for site, value, layout in sites:
                load = partial(_read_attached, intact, value, site)
                tensor = DumpedTensor.of_values(site, str(site), load, value)
                yield replace(tensor, layout=layout, axes=axes)


def _are_intact(trace: Trace, attachments: Sequence[str]) -> bool:
    return all(trace.is_intact(trace.attached_as(name, "tensors")) for name in attachments)


def _read_attached(intact: Callable[[], bool], value: Tensor, site: Site) -> Tensor:
    if not intact():
        raise UnreadableFileError(
            f"{site}: the values of its step have changed since they were recorded"
        )
    return value.detach()


def _read_axes(trace: Trace) -> dict[str, tuple[int, int]]:
    recorded: Any = trace.manifest.get("mesh_axes", {})
    try:
        return {name: (int(place), int(size)) for name, (place, size) in recorded.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TraceError.damaged(trace.folder, "mesh_axes", repr(error)) from None


def _parse_site(row: dict[str, Any], step: int, rank: int) -> Site:
    """Return the address of a value. A gradient gets the port of its parameter."""
    phase, index = row["phase"], row["index"]
    if phase not in get_args(Phase) or type(index) is not int:
        raise ValueError(f"{phase!r}, {index!r}")
    port = re.sub(r"^gradient\.", "parameter.", row["port"])
    at = CallSite(step, str(row["module"]), phase=phase, micro_batch=index, rank=rank)
    return Site(at, port)


def _provenance(trace: Trace) -> dict[str, str]:
    facts = {key: value for key, value in trace.manifest.items() if isinstance(value, str)}
    if isinstance(size := trace.manifest.get("world_size"), int) and size > 1:
        facts["world_size"] = str(size)
    if dtype := facts.pop("dtype", ""):
        facts["inputs"] = f"those of every module are rounded to {dtype}"
    for name in ("golden.json", "report.json"):
        file = trace.folder.parent / name
        if dtype and file.is_file():
            report = read_json_object(file)
            facts["reference"] = _text_at(report, "reference", "run")
            facts["yardstick"] = _text_at(
                report, "sections", trace.folder.name, "yardstick_dtype"
            ) or _text_at(report, "reference", "yardstick")
    return {name: fact for name, fact in facts.items() if fact}


def _text_at(value: object, *keys: str) -> str:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
