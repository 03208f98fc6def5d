"""Faults as dumps: a model with a fault is dumped, and the comparison has to find the fault in files."""

import os
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

import assay
from assay.generate.passes.generation_loop import generate, limits_of_generation
from assay.inputs import PlanOptions, plan_batches
from assay.models import load_model
from assay.offline.check import Comparison, compare
from assay.plugins import load_object
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.faults.corpus import Fault
from packages.core.tests.trials.tables import markdown_table, number
from packages.core.tests.trials.trial import run_all

Format = Literal["assay", "msprobe"]
Mode = Literal["noise", "model"]

_OPTIONS = PlanOptions(max_new_tokens=12)


@dataclass(frozen=True)
class DumpTask:
    """A model to dump. rounded_to: of the yardstick, the dtype of its weights."""

    recipe: str
    dtype: str
    folder: Path
    format: Format
    rounded_to: str | None = None
    setup: str | None = None


@dataclass(frozen=True)
class Work:
    """A fault whose dump is compared, with and without a model."""

    fault: Fault
    format: Format
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
    def located(self) -> bool:
        """Whether the verdict names the module that makes the error."""
        location = self.verdict.location
        return location is not None and location.module == self.fault.stage.module


def write_dump(task: DumpTask) -> None:
    """Generate with a model and dump it, in a process of its own: setups patch globals."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"{task} ended with {status}")
        return
    try:
        _write(task)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - reported by the parent
        traceback.print_exc()
        os._exit(1)


def _write(task: DumpTask) -> None:
    loaded = load_model(f"micro:{task.recipe}", dtype=task.dtype, rounded_to=task.rounded_to)
    if task.setup is not None:
        changed = load_object(task.setup)(loaded.model)
        loaded = loaded if changed is None else replace(loaded, model=changed)
    plan = plan_batches(limits_of_generation(loaded), _OPTIONS, loaded.encode)
    with torch.no_grad(), _writer(task, loaded.model):
        for batch in plan.batches:
            generate(loaded, batch)


def _writer(task: DumpTask, model: nn.Module) -> AbstractContextManager[object]:
    if task.format == "assay":
        return assay.capture(model, task.folder)
    return dumped(model, task.folder)


def write_clean(work: Work) -> None:
    """Write the yardstick and the noise run of a recipe and dtype."""
    fault = work.fault
    yardstick = DumpTask(fault.recipe, "float64", work.clean / "yardstick", "assay", fault.dtype)
    write_dump(yardstick)
    write_dump(DumpTask(fault.recipe, fault.dtype, work.clean / "noise", "assay"))


def judge(work: Work) -> list[OfflineFinding]:
    """Dump a model with a fault, and compare the dump by noise, then with the trusted model."""
    fault = work.fault
    folder = work.folder / f"{fault.name} {work.format}".replace("/", "-").replace(" ", "_")
    dump = folder / "dump"
    write_dump(DumpTask(fault.recipe, fault.dtype, dump, work.format, setup=fault.setup))
    found = []
    for mode in get_args(Mode):
        out = folder / mode
        out.mkdir(parents=True)
        comparison = Comparison(
            str(work.clean / "yardstick"),
            str(dump),
            model=f"micro:{fault.recipe}" if mode == "model" else None,
            noise=str(work.clean / "noise"),
            allow_unmatched=("*",),
        )
        verdict = compare(comparison, out, SilentProgress())
        found.append(OfflineFinding(fault, work.format, mode, verdict))
    shutil.rmtree(folder)
    return found


def examine(faults: Sequence[Fault], folder: Path) -> Iterator[OfflineFinding]:
    """Judge every fault in both formats."""
    works = [Work(fault, form, folder) for fault in faults for form in get_args(Format)]
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
    """State for each dtype, format and mode how many faults are located."""
    lines = []
    for key in sorted({(one.fault.dtype, one.format, one.mode) for one in findings}):
        chosen = [one for one in findings if (one.fault.dtype, one.format, one.mode) == key]
        located = sum(one.located for one in chosen)
        share = located / len(chosen)
        lines.append(f"{', '.join(key)}: {located} of {len(chosen)} located ({share:.0%})")
    return "\n".join(lines)
