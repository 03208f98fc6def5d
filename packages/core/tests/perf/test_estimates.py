"""The time that a check tells before it starts and while it runs, beside the time that it takes."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from assay.devices.run_string import parse_run
from assay.generate.processes.candidate import run_candidate
from assay.generate.processes.golden import capture_golden
from assay.generate.processes.requests import CandidateRequest, GoldenRequest
from assay.progress import Progress, Task
from assay.runs import SilentProgress
from assay.training.processes.candidate import run_candidate as run_trainer
from assay.training.processes.reference import record_reference
from assay.training.processes.requests import ReferenceRequest, TrainerRequest, TrainOptions
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times

COMMON: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Five kinds, of 20 to 60 million parameters. Smaller models get no estimate.
CONFIGS: dict[str, PretrainedConfig] = {
    "BertForMaskedLM": transformers.BertConfig(hidden_size=512, num_attention_heads=8),
    "GPT2LMHeadModel": transformers.GPT2Config(n_embd=512, n_head=8, n_layer=8, **COMMON),
    "LlamaForCausalLM": transformers.LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=6,
        num_key_value_heads=2, **COMMON,
    ),
    "MixtralForCausalLM": transformers.MixtralConfig(
        hidden_size=384, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, num_local_experts=8, **COMMON,
    ),
    "Gemma2ForCausalLM": transformers.Gemma2Config(
        vocab_size=32_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, **COMMON,
    ),
}  # fmt: skip

_LEFT = re.compile(r"\[\d+ of \d+, (?:(\d+) min )?(\d+) s left\]")


Work = Callable[[Progress], None]


class Told(SilentProgress):
    """A display that keeps the time left that it tells as each phase begins."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.left: list[tuple[float, float]] = []
        """Seconds since the first phase, and seconds left."""

    @contextmanager
    def open_task(self, description: str, total: float | None, unit: str) -> Iterator[Task]:
        """Keep the time of a numbered phase."""
        if found := _LEFT.match(description):
            if not self.left:
                self.began = time.monotonic()
            left = 60 * int(found[1] or 0) + int(found[2])
            self.left.append((time.monotonic() - self.began, left))
        with super().open_task(description, total, unit) as task:
            yield task

    def errors(self) -> tuple[float, float]:
        """Return the factor by which the first estimate errs, and the largest share later on.

        Later: after a quarter of the time.
        """
        took = time.monotonic() - self.began
        (_, first), *_ = self.left
        later = [(at + left) / took - 1 for at, left in self.left if at >= took / 4]
        return max(first / took, took / first), max(map(abs, later))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_time_is_told_within_its_bounds(
    architecture: str, new_folder: Callable[[], Path], table: Table
) -> None:
    folder = new_folder()
    model = str(folder / "model")
    getattr(transformers, architecture)(CONFIGS[architecture]).save_pretrained(model)
    golden, run = folder / "golden", parse_run("cpu/bfloat16")

    def of_reference(progress: Progress) -> None:
        capture_golden(
            GoldenRequest(
                model=model,
                reference=parse_run("cpu/float32"),
                noise_for=["bfloat16"],
                folder=str(golden),
            ),
            progress,
        )

    def of_candidate(progress: Progress) -> None:
        request = CandidateRequest(
            model=model, candidate=run, golden=str(golden), folder=str(folder / "candidate")
        )
        run_candidate(request, progress)

    assert_told_times(architecture, of_reference, of_candidate, table)


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if "Masked" not in name])
def test_time_of_training_is_told_within_its_bounds(
    architecture: str, new_folder: Callable[[], Path], table: Table
) -> None:
    folder = new_folder()
    golden, options = folder / "golden", TrainOptions(model=str(folder / "model"))
    getattr(transformers, architecture)(CONFIGS[architecture]).save_pretrained(options.model)
    golden.mkdir()

    def of_reference(progress: Progress) -> None:
        request = ReferenceRequest(
            options=options, reference="cpu/float32", dtype="bfloat16", folder=str(golden)
        )
        record_reference(request, progress)

    def of_candidate(progress: Progress) -> None:
        request = TrainerRequest(
            options=options,
            candidate="cpu/bfloat16",
            golden=str(golden),
            folder=str(folder / "candidate"),
            trainer="reference",
        )
        run_trainer(request, progress)

    assert_told_times(f"training of {architecture}", of_reference, of_candidate, table)


def assert_told_times(name: str, of_reference: Work, of_candidate: Work, table: Table) -> None:
    """Run both sides, and compare the times that they tell with those that they take."""
    for side, work in (("reference", of_reference), ("candidate", of_candidate)):
        told = Told()
        work(told)
        first, later = told.errors()
        row = f"{side} of {name}"
        table.at_most(f"{row}: estimate", Times(first, first), 1.5, "or its inverse, of the time")
        table.at_most(f"{row}: after a quarter", Times(later, later), 0.3, "of the time, off")
