"""Find wrong values in a replay, and keep the programs that made them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.hooks.caches import KEPT
from assay.hooks.row_positions import RowIndex
from assay.launch import RemoteFunction, call
from assay.recording.programs import ProgramRecorder, RecordedValue
from assay.replay.ports import allowed, is_attention_mask
from assay.replay.trace_views import ReplayedTrace
from assay.runs import Progress
from assay.sites import CallSite, Phase, Site


class Wanted(NamedTuple):
    """The values whose programs one side records."""

    step: int | None
    """None for any step."""
    ports: tuple[tuple[Phase, str, str], ...]
    """Phase, module and port of values at any call in this step; the candidate's."""
    sites: tuple[Site, ...] = ()
    """Values at these calls; of the noise run."""

    @property
    def is_of_loop(self) -> bool:
        """Return True if a value is an input of the model, which the code around it made."""
        inputs = (_is_input(one.at, one.port) for one in self.sites)
        return any(inputs) or any(phase == "inputs" for phase, *_ in self.ports)


def pair_programs(
    record: RemoteFunction[tuple[Any, Wanted], list[RecordedValue]],
    check: Any,  # noqa: ANN401 - of generation or training
    wanted: Wanted,
    progress: Progress,
    **candidate: Any,  # noqa: ANN401 - world and Python
) -> list[RecordedValue]:
    """Record the candidate's programs of wanted values, then the reference's of the same values.

    record: records one side in its own process: the reference if sites are wanted.
    """
    ask = partial(call, record, folder=check.folder, progress=progress)
    by_rank = ask((check, wanted), name="candidate", **candidate)
    made = [{one.site: one.program for one in of_rank} for of_rank in by_rank]
    wrong = [(k, one) for k, of_rank in enumerate(by_rank) for one in of_rank if one.error > 0]
    if not wrong:
        return []
    # What backward computes again, the reference computes in forward.
    both = [site for _, one in wrong for site in (one.site, _in_forward(one.site))]
    same = wanted._replace(ports=(), sites=tuple(dict.fromkeys(both)))
    (trusted,) = ask((check, same), name="reference")
    right = {one.site: one.program for one in trusted}
    pairs = []
    for rank, one in wrong:
        reference = right.get(one.site, right.get(_in_forward(one.site)))
        ranks = [of_rank[one.site] for of_rank in made if one.site in of_rank]
        ranks = ranks if len(ranks) == len(made) else []
        pairs.append(one._replace(reference=reference, rank=rank, ranks=ranks))
    return pairs


def _in_forward(site: Site) -> Site:
    return replace(site, at=replace(site.at, phase="forward"))


_Key = tuple[Phase, str, str] | Site


@dataclass
class ProgramFinder(ProgramRecorder):
    """Records operations, and keeps the programs of wanted values."""

    wanted: Wanted = field(kw_only=True)
    trace: ReplayedTrace = field(kw_only=True)
    found: dict[_Key, RecordedValue] = field(kw_only=True)
    _step: int = -1

    def begin_step(self, step: int) -> bool:
        """Begin again with a new step. Returns: True if its operations are wanted."""
        if step != self._step:
            self._step = step
            self.forget()
        return self.wanted.step in (None, step)

    def of_step(self, step: int) -> AbstractContextManager[object]:
        """Return the context of a step."""
        return self if self.begin_step(step) else nullcontext()

    def measure(self, site: CallSite, port: str, value: Tensor, expected: Tensor) -> None:
        """Keep the program of a wanted value that has a larger error than those before."""
        if port.startswith("input."):
            self.inject(site, port, value)
        at = Site(site, port)
        phase: Phase = "inputs" if _is_input(site, port) else site.phase
        key: _Key = at if self.wanted.sites else (phase, site.module, port)
        is_of_step = self.wanted.step in (None, site.step)
        if not is_of_step or key not in (self.wanted.sites or self.wanted.ports):
            return
        call = self.trace.find(replace(site, phase="forward"))
        # Earlier tokens of a cache are those of no call.
        rows = call.rows if call and not port.startswith(KEPT) else None
        answer = answer_of(port, expected, RowIndex(rows))
        error = _relative_error(answer, value)
        # Right values, too: other ranks may need them.
        is_worst = error > (self.found[key].error if key in self.found else -1.0)
        if is_worst or self.wanted.sites:
            modules = dict(self.model.named_modules())
            module_class = type(modules[site.module]).__name__ if site.module in modules else ""
            made = at, self.program_of(value), None, answer, error
            self.found[key] = RecordedValue(*made, module_class=module_class)

    def inject(self, site: CallSite, port: str, value: Tensor) -> None:
        """Name an input of programs."""
        name = port.removeprefix("input.").replace("output", "result")
        self.name(value, f"{site.module.rpartition('.')[2]}.{name}".strip("."))


def _is_input(site: CallSite, port: str) -> bool:
    return site.module == "" and site.phase == "forward" and port.startswith("input.")


def answer_of(port: str, answer: Tensor, index: RowIndex) -> dict[str, Tensor]:
    """Return the recorded value, and which of its rows are compared (those of tokens), by name."""
    if is_attention_mask(port, answer):
        answer = allowed(answer)
    elif answer.ndim == 2 and not answer.is_floating_point():
        answer = answer[..., None]  # a number for each token
    return {"right": answer, "compared": index.kept(answer.shape)}


def _relative_error(answer: dict[str, Tensor], value: Tensor) -> float:
    actual, expected, kept = value.detach().cpu(), answer["right"], answer["compared"]
    if actual.shape != expected.shape:
        return 1.0
    if expected.dtype is torch.bool:
        actual = allowed(actual)
    actual, expected = actual[kept], expected[kept]
    if not expected.is_floating_point():
        return float((actual != expected).double().mean())
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(error.nan_to_num(torch.inf))
