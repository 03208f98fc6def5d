"""Dumps of micro models, in one format or in both, each written by a process of its own."""

import os
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch

import assay
from assay.generate.generation_loop import generate, limits_of_generation
from assay.hooks.suspension import ExactDouble
from assay.inputs import BatchOptions, plan_batches
from assay.inputs.batches import Prompt
from assay.models import LoadedModel, load_model
from assay.plugins import load_object
from packages.core.tests.dump_writers.msprobe import dumped

Format = Literal["assay", "msprobe"]


@dataclass(frozen=True)
class DumpTask:
    """A model to dump, into a folder below `folder` for each format.

    rounded_to: of the yardstick, the dtype of its weights.
    texts: the prompts; without them the built-in ones and a long one.
    """

    recipe: str
    dtype: str
    folder: Path
    options: BatchOptions
    formats: tuple[Format, ...] = get_args(Format)
    rounded_to: str | None = None
    setup: str | None = None
    texts: tuple[str, ...] = ()


def write_dump(task: DumpTask) -> None:
    """Generate with a model and dump it. Setups patch globals, which end with the process."""
    _load(task.recipe)  # its modules, once for all children
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"{task} ended with {status}")
        return
    try:
        # Its thread pool is gone. Threads that load a model would all make a new one at once.
        torch.set_num_threads(torch.get_num_threads())
        _write(task)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - reported by the parent
        traceback.print_exc()
        os._exit(1)


@cache
def _load(recipe: str) -> LoadedModel:
    return load_model(f"micro:{recipe}", dtype="float32")


def _write(task: DumpTask) -> None:
    loaded = load_model(f"micro:{task.recipe}", dtype=task.dtype, rounded_to=task.rounded_to)
    if task.setup is not None:
        changed = load_object(task.setup)(loaded.model)
        loaded = loaded if changed is None else replace(loaded, model=changed)
    prompts = [Prompt(text, tuple(loaded.encode(text))) for text in task.texts] or None
    plan = plan_batches(limits_of_generation(loaded), task.options, loaded.encode, prompts)
    with torch.no_grad(), ExitStack() as writers:
        for form in task.formats:
            write = assay.capture if form == "assay" else dumped
            writers.enter_context(write(loaded.model, task.folder / form))
        if task.dtype == "float64":
            writers.enter_context(ExactDouble())
        for batch in plan.batches:
            generate(loaded, batch)
