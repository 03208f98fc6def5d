"""Coverage: how much of a model was compared, judged from the parts that each side used, and its wording."""

import difflib
import fnmatch
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pydantic import Field

from assay.errors import name_some
from assay.verdicts import Coverage, Record, is_part_of

if TYPE_CHECKING:
    from assay.judge.results import ReplayResults


NO_CODE = "by no code"


class Usage(Record):
    """Parts of a model that one process used, as observed by `assay.hooks.coverage_watch.UsageWatch`."""

    parameters: dict[str, list[str]] = Field(default_factory=dict)
    """Parameters by the path of the module that owns them."""
    called: list[str] = Field(default_factory=list)
    """Modules that were called."""
    read: list[str] | None = None
    """Parameters that operations read; null if reads were not watched."""
    other_uses: dict[str, str] = Field(default_factory=dict)
    """The use of parameters that no operation read: "in training", "with" an argument that no check gives, or
    `NO_CODE`."""
    experts: dict[str, list[int]] = Field(default_factory=dict)
    """Token count of each expert, by the path of the expert group."""
    equal_rows: list[str] = Field(default_factory=list)
    """Position ids whose several rows never differed."""
    cache_slots: int = 0
    """Positions that were written to caches."""
    cache_slots_read: int = 0
    """Written cache positions that a later call could read."""

    @classmethod
    def of_ranks(cls, usages: Sequence[Self]) -> "Usage":
        """Merge the usage of all ranks of one model."""
        parameters: dict[str, list[str]] = {}
        for usage in usages:
            for module, names in usage.parameters.items():
                known = parameters.setdefault(module, [])
                known += [name for name in names if name not in known]
        reads = [usage.read for usage in usages if usage.read is not None]
        return Usage(
            parameters=parameters,
            called=sorted({path for usage in usages for path in usage.called}),
            read=sorted({name for read in reads for name in read}) if reads else None,
        )

    def runs(self, module: str) -> bool:
        """Return True if the module was called, or other code computed with its parameters."""
        return module in self._called or any(
            name in self._read for name in self.parameters.get(module, ())
        )

    def model_post_init(self, context: object) -> None:
        """Index the names."""
        del context
        self._called, self._read = frozenset(self.called), frozenset(self.read or ())

    _called: frozenset[str] = frozenset()
    _read: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ComparedStages:
    """The modules whose work was compared at module boundaries."""

    recorded: frozenset[str] = frozenset()
    """Modules for which the reference has values."""
    compared: frozenset[str] = frozenset()
    """Modules for which the candidate's values were compared."""
    uncalled: frozenset[str] = frozenset()
    """Modules that the candidate does not call, inside a called module."""

    @classmethod
    def of(cls, noise: "ReplayResults", candidates: Sequence["ReplayResults"]) -> Self:
        """Collect the stages of a noise run and of all ranks of a candidate."""
        return cls(
            frozenset(port.stage.module for port in noise.ports.values()),
            frozenset(
                port.stage.module
                for results in candidates
                for port in results.ports.values()
                if port.sums.num_elements or port.exact.num_compared
            ),
            frozenset(name for results in candidates for name in results.uncalled_modules),
        )

    def includes(self, module: str) -> bool:
        """Return True if `module` or an enclosing module was compared, or if none of them has recorded values.

        The level then compares outputs only, or other modules got what the code between them read here.
        """
        around = _around(module)
        for path in around:
            if path in self.compared:
                return True
            if path in self.recorded and path not in self.uncalled:
                return False
        return self.recorded.isdisjoint(around)


@dataclass(slots=True)
class CoverageParts:
    """The inputs of the coverage judgment."""

    reference: Usage
    candidate: Usage | None
    """None if the candidate could not be watched."""
    stages: ComparedStages = field(default_factory=ComparedStages)
    untouched: Sequence[str] = ()
    """Trained parameters without any gradient."""
    allowed: Sequence[str] = ()
    """GLOBs of parts that may stay uncompared."""


def judge_coverage(parts: CoverageParts) -> Coverage:
    """Judge how much of both models contributed to the compared values."""
    reference, candidate = parts.reference, parts.candidate
    experts = {
        f"{group}.{number}": count
        for group, counts in reference.experts.items()
        for number, count in enumerate(counts)
    }
    unrouted = [name for name, count in experts.items() if not count]
    run = {
        module
        for module in reference.parameters
        if reference.runs(module) and parts.stages.includes(module)
    }
    owners = set(reference.parameters)
    missing = owners - run
    unused = set(_unread(reference, run))
    if candidate is not None:
        only_here = candidate.parameters.keys() - owners
        owners |= only_here
        missing |= {module for module in only_here if not candidate.runs(module)}
        unused |= set(_unread(candidate, only_here - missing))
    missing = {name for name in missing if not set(_around(name)) & set(unrouted)}
    known = {*missing, *reference.experts}
    uses, of_modules = reference.other_uses, reference.parameters
    excused = {name for name in missing & of_modules.keys() if {*of_modules[name]} <= uses.keys()}
    missing -= excused
    in_excused = {name for module in excused for name in of_modules[module]}
    others = {name: use for name, use in uses.items() if name in unused | in_excused}
    unused -= others.keys()
    unused |= {name for name in parts.untouched if not known & set(_around(name))}
    coverage = Coverage(
        modules=len(reference.parameters),
        modules_run=len(run),
        candidate_modules=candidate and len(candidate.parameters),
        candidate_modules_run=candidate and sum(map(candidate.runs, candidate.parameters)),
        not_run=sorted(missing),
        not_run_parts=_topmost(missing, owners),
        unused_parameters=sorted(unused),
        other_uses=others,
        unrouted_experts=unrouted,
        equal_rows=reference.equal_rows,
        cache_slots=reference.cache_slots,
        cache_slots_read=reference.cache_slots_read,
        allowed=list(parts.allowed),
    )
    named = {*owners, *experts, *itertools.chain(*reference.parameters.values())}
    paths = {path for name in named for path in _around(name) if path}
    coverage.unmatched_globs = {
        glob: []
        if fnmatch.filter(paths, glob)
        else difflib.get_close_matches(glob.strip("*"), sorted(paths))
        for glob in parts.allowed
        if not any(is_part_of(name, glob) for name in coverage.gaps)
    }
    return coverage


def _unread(usage: Usage, modules: Collection[str]) -> Iterator[str]:
    """Return the parameters of `modules` that no operation read."""
    if usage.read is None:
        return
    read = set(usage.read)
    for module in modules:
        yield from (name for name in usage.parameters[module] if name not in read)


def _topmost(missing: Collection[str], owners: Collection[str]) -> dict[str, int]:
    """Return the topmost modules that are missing entirely, each with its number of missing parts."""
    total = Counter(path for name in owners for path in _around(name))
    absent = Counter(path for name in missing for path in _around(name))
    found: Counter[str] = Counter()
    for name in sorted(missing):
        around = reversed(_around(name))
        top = next((path for path in around if path and absent[path] == total[path]), name)
        found[top] += 1
    return dict(found)


def _around(module: str) -> list[str]:
    """Return the path of a module and of its enclosing modules, innermost first."""
    parts = module.split(".") if module else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def describe_coverage(coverage: Coverage) -> str:
    """Describe in one line which parts of the model were compared."""
    ran, total = coverage.modules_run, coverage.modules
    text = f"all {total:,}" if ran == total else f"{ran:,} of {total:,}"
    text = f"coverage: {text} modules with parameters ran"
    on_candidate = coverage.candidate_modules_run, coverage.candidate_modules
    if on_candidate == (None, None):
        text += " (the candidate's were not watched)"
    elif on_candidate != (ran, total):
        text += f" (on the candidate {on_candidate[0]:,} of {on_candidate[1]:,})"
    gaps = list_gaps(coverage)
    gaps += ["--allow-unused GLOB passes without them"] if coverage.forbidden_gaps else []
    return "; ".join([text, *gaps, *_list_minor_gaps(coverage)])


def list_gaps(coverage: Coverage) -> list[str]:
    """List the uncompared parts by kind."""
    parts = [
        f"{path or '(model)'} ({count:,} modules)" if count > 1 else path or "(model)"
        for path, count in coverage.not_run_parts.items()
    ]
    kinds = {
        "never ran": parts,
        "parameters that nothing read": coverage.unused_parameters,
        "experts without a token": coverage.unrouted_experts,
    }
    return [f"{kind}: {name_some(names)}" for kind, names in kinds.items() if names]


def notes_on_coverage(coverage: Coverage) -> list[str]:
    """List the gaps that --allow-unused covers, and its GLOBs that cover no gap."""
    notes = []
    if coverage.gaps and not coverage.forbidden_gaps:
        notes.append(f"not compared, as --allow-unused allows: {'; '.join(list_gaps(coverage))}")
    for glob, nearest in coverage.unmatched_globs.items():
        why = "all parts that it matches were compared, or it matches none"
        if nearest:
            why = f"the model has no such name; the nearest are {name_some(nearest)}"
        notes.append(f"--allow-unused {glob} covers nothing: {why}")
    return notes


def _list_minor_gaps(coverage: Coverage) -> list[str]:
    """List parts that the inputs did not exercise and that do not count as gaps."""
    uses = coverage.other_uses.values()
    gaps = [
        f"read {use if use == NO_CODE else f'only {use}'}:"
        f" {name_some([name for name, one in coverage.other_uses.items() if one == use])}"
        for use in dict.fromkeys(uses)
    ]
    if coverage.equal_rows:
        names = {port.rpartition(".")[2] for port in coverage.equal_rows}
        gaps.append(f"the rows of {name_some(sorted(names))} never differed")
    unread = coverage.cache_slots - coverage.cache_slots_read
    if unread:
        where = "written by the last call of each text"
        gaps.append(f"cache slots never read: {unread:,} of {coverage.cache_slots:,} ({where})")
    return gaps
