"""Faults as dumps: a model with a fault is dumped, and the comparison has to find the fault in files."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.judging.verdict import judge_dumps
from assay.dumps.recognizing import open_dump
from assay.inputs import BatchOptions
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from packages.core.tests.faults.corpus import Fault
from packages.core.tests.trials.model_dumps import DumpTask, Format, write_dump
from packages.core.tests.trials.offline_memory import Memory, open_shared, read_once
from packages.core.tests.trials.tables import markdown_table, number
from packages.core.tests.trials.trial import run_all

Mode = Literal["noise", "model"]

# All prompts in one batch: time goes with the number of forward passes. One plant shows in the ninth
# step of decoding.
_OPTIONS = BatchOptions(batch_size=8, max_new_tokens=10)
_MEMORY = Memory()


@dataclass(frozen=True)
class Work:
    """A fault whose dumps are compared, with and without a model."""

    fault: Fault
    folder: Path

    @property
    def clean(self) -> Path:
        """The folder of the dumps without a fault."""
        return self.folder / f"{self.fault.recipe}-{self.fault.dtype}"


@dataclass(frozen=True)
class OfflineFinding:
    """The verdict on one dump, by one mode."""

    fault: Fault
    format: Format
    mode: Mode
    verdict: Verdict

    @property
    def is_in_dump(self) -> bool:
        """Return True if the dump holds the faulty module. msprobe records no outermost one."""
        return self.format == "assay" or bool(self.fault.stage.module)

    @property
    def located(self) -> bool:
        """Whether the verdict names the module that makes the error."""
        location = self.verdict.location
        return location is not None and location.module == self.fault.stage.module


def write_clean(work: Work) -> None:
    """Write the yardstick and the noise run of a recipe and dtype."""
    recipe, dtype = work.fault.recipe, work.fault.dtype
    write_dump(
        DumpTask(
            recipe, "float64", work.clean / "yardstick", _OPTIONS, ("assay",), rounded_to=dtype
        )
    )
    write_dump(DumpTask(recipe, dtype, work.clean / "noise", _OPTIONS, ("assay",)))


def judge(work: Work) -> list[OfflineFinding]:
    """Dump a model with a fault, and compare the dumps by noise, then with the trusted model."""
    fault = work.fault
    folder = work.folder / fault.name.replace("/", "-").replace(" ", "_")
    write_dump(DumpTask(fault.recipe, fault.dtype, folder, _OPTIONS, setup=fault.setup))
    found = []
    expected, noise = (str(work.clean / name / "assay") for name in ("yardstick", "noise"))
    for form in get_args(Format):
        comparison = CompareOptions(
            expected,
            str(folder / form),
            model=f"micro:{fault.recipe}",
            noise=noise,
            allow_unmatched=("*",),
        )
        with _MEMORY.active():
            actual = read_once(open_dump(comparison.actual))
            compare_dumps(
                comparison, open_shared(expected), actual, SilentProgress(), open_shared(noise)
            )
        assert _MEMORY.dumps is not None
        dumps = _MEMORY.dumps
        for mode in get_args(Mode):
            kept = dumps if mode == "model" else replace(dumps, replayed=None)
            found.append(OfflineFinding(fault, form, mode, judge_dumps(kept)[0]))
    shutil.rmtree(folder)
    return found


def examine(faults: Sequence[Fault], folder: Path) -> Iterator[OfflineFinding]:
    """Judge every fault in both formats, those of one recipe and dtype in a row."""
    works = [
        Work(fault, folder) for fault in sorted(faults, key=lambda one: (one.recipe, one.dtype))
    ]
    run_all(write_clean, list({work.clean: work for work in works}.values()))
    for found in run_all(judge, works):
        yield from found


def offline_table(findings: Sequence[OfflineFinding]) -> str:
    """One row for each fault, format and mode, as Markdown."""
    head = ("fault", "recipe", "dtype", "dump", "judged by", "verdict", "right", "location",
            "statistic", "ratio", "limit")  # fmt: skip
    rows = []
    for one in findings:
        location, verdict = one.verdict.location, one.verdict
        rows.append((
            one.fault.plant, one.fault.recipe, one.fault.dtype, one.format, one.mode,
            verdict.verdict.value, "yes" if one.located else "no",
            (location.module or "(model)") if location else "",
            verdict.statistic or "", number(verdict.noise_ratio), number(verdict.limit),
        ))  # fmt: skip
    return markdown_table(head, rows)


def offline_totals(findings: Sequence[OfflineFinding]) -> str:
    """One row for each mode and dtype: how many faults are located, by format."""
    rows = []
    for mode, dtype in sorted({(one.mode, one.fault.dtype) for one in findings}):
        chosen = [one for one in findings if (one.mode, one.fault.dtype) == (mode, dtype)]
        shares = []
        for form in get_args(Format):
            of_format = [one for one in chosen if one.format == form]
            located = sum(one.located for one in of_format)
            shares.append(f"{located} of {len(of_format)} ({located / len(of_format):.0%})")
        rows.append((mode, dtype, *shares))
    return markdown_table(("judged by", "dtype", *get_args(Format)), rows)
