"""The result of the check for each fault, and whether it is right."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from assay.generate.spec import InputOptions
from assay.stages import Stage
from assay.verdicts import Outcome as VerdictOutcome
from packages.core.tests.faults.corpus import Fault
from packages.core.tests.trials.tables import markdown_table, number
from packages.core.tests.trials.trial import Golden, Outcome, Trial, capture, hold, run_all

# A third of the default's decode steps: every fault but the size of a sample is the same.
INPUTS = InputOptions(max_new_tokens=12)


@dataclass(frozen=True)
class Finding:
    """A fault and the check of the model that has it.

    size: relative error of the worst tensor that the right stage makes, in float32 where the
        fault was planted in float32 too: there rounding adds nothing. Of what must be exact, the
        share that differs.
    vacuous: every number is the same as without the fault.
    """

    fault: Fault
    outcome: Outcome
    size: float
    vacuous: bool

    @property
    def detected(self) -> bool:
        """Whether the verdict is FAIL."""
        return self.outcome.verdict.verdict is VerdictOutcome.FAIL

    @property
    def located(self) -> bool:
        """Whether it was detected, and at the right stage."""
        return self.detected and self.place == self.fault.stage

    @property
    def place(self) -> Stage | None:
        """The stage that the check reports."""
        location = self.outcome.verdict.location
        return Stage(location.module or "", location.phase) if location is not None else None

    @property
    def declared(self) -> bool:
        """Whether the resolution that the check reports is too coarse for the fault."""
        resolution = self.outcome.verdict.resolution
        return not self.detected and resolution is not None and resolution >= self.size


def examine(faults: Sequence[Fault], folder: Path, device: str) -> Iterator[Finding]:
    """Plant every fault, and check each faulty model and its healthy control on `device`."""
    goldens = {
        key: Golden(f"micro:{key[0]}", key[1], folder / "-".join(key), INPUTS)
        for key in sorted({(fault.recipe, fault.dtype) for fault in faults})
    }
    run_all(capture, list(goldens.values()))
    trial = partial(_trial, folder=folder, device=device)
    clean = [trial(None, golden) for golden in goldens.values()]
    planted = [trial(fault, goldens[fault.recipe, fault.dtype]) for fault in faults]
    controls = run_all(hold, clean)
    for control, outcome in zip(clean, controls, strict=True):
        assert outcome.verdict.verdict is VerdictOutcome.PASS, f"{control.name}: {outcome.verdict}"
    healthy = {outcome.fingerprint for outcome in controls}
    found = list(zip(faults, run_all(hold, planted), strict=True))
    sizes = {
        (fault.plant, fault.recipe): _size(outcome)
        for fault, outcome in sorted(found, key=lambda pair: pair[0].dtype)
    }
    for fault, outcome in found:
        size = sizes[fault.plant, fault.recipe]
        yield Finding(fault, outcome, size, outcome.fingerprint in healthy)


def findings_table(findings: Iterable[Finding]) -> str:
    """One row for each fault, as Markdown."""
    head = (
        "fault", "recipe", "dtype", "found", "module right", "location", "operation", "diagnosis",
        "statistic", "ratio", "limit", "resolution", "size",
    )  # fmt: skip
    return markdown_table(head, (_row(finding) for finding in findings))


def totals(findings: Sequence[Finding]) -> str:
    """How many faults of each dtype were found and placed, in a sentence each."""
    lines = []
    for dtype in dict.fromkeys(finding.fault.dtype for finding in findings):
        some = [finding for finding in findings if finding.fault.dtype == dtype]
        detected, located = (
            sum(getattr(finding, name) for finding in some) for name in ("detected", "located")
        )
        diagnosed = sum(
            finding.outcome.verdict.diagnosis == finding.fault.diagnosis for finding in some
        )
        lines.append(
            f"{dtype}: of {len(some)} faults {detected} ({detected / len(some):.1%}) are found,"
            f" {located} ({located / len(some):.1%}) in the right module,"
            f" {diagnosed} with the right diagnosis."
        )
    return "\n".join(lines)


def _trial(fault: Fault | None, golden: Golden, folder: Path, device: str) -> Trial:
    name = fault.name if fault is not None else f"clean {golden.model} {golden.dtype}"
    return Trial(
        name,
        golden,
        f"{device}/{golden.dtype}",
        folder / "trials" / name.replace(":", "-").replace(" ", "-"),
        setup=fault.setup if fault is not None else None,
        taps=fault.stage if fault is not None else None,
    )


def _size(outcome: Outcome) -> float:
    exact, whole = outcome.taps.get("exact"), outcome.taps.get("replay-tensor")
    if "non-finite" in outcome.taps:
        return math.nan
    if exact is not None and exact.actual > 0:
        return exact.actual
    return whole.actual if whole is not None else 0.0


def _row(finding: Finding) -> tuple[str, ...]:
    fault, verdict = finding.fault, finding.outcome.verdict
    location = verdict.location
    return (
        fault.plant,
        fault.recipe,
        fault.dtype,
        "yes" if finding.detected else "declared" if finding.declared else "no",
        "yes" if finding.located else "no" if finding.detected else "",
        _name(finding.place),
        (location.op if location is not None else None) or "",
        verdict.diagnosis or "",
        verdict.statistic or "",
        number(verdict.noise_ratio),
        number(verdict.limit),
        number(verdict.resolution),
        number(finding.size),
    )


def _name(stage: Stage | None) -> str:
    if stage is None:
        return ""
    return str(stage) if stage.phase == "forward" else f"{stage} ({stage.phase})"
