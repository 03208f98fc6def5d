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
from assay.generate.processes.remote_functions import CANDIDATE, GOLDEN
from assay.generate.processes.requests import CandidateRequest, GoldenRequest
from assay.progress import Task
from assay.runs import RemoteFunction, SilentProgress, ask
from assay.training.processes.remote_functions import CANDIDATE as TRAINER
from assay.training.processes.remote_functions import REFERENCE
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
    model, golden = str(folder / "model"), str(folder / "golden")
    getattr(transformers, architecture)(CONFIGS[architecture]).save_pretrained(model)
    reference = GoldenRequest(
        model=model, reference=parse_run("cpu/float32"), noise_for=["bfloat16"], folder=golden
    )
    candidate = CandidateRequest(
        model=model,
        candidate=parse_run("cpu/bfloat16"),
        golden=golden,
        folder=str(folder / "candidate"),
    )

    assert_told_times(f"reference of {architecture}", GOLDEN, reference, folder, table)
    assert_told_times(f"candidate of {architecture}", CANDIDATE, candidate, folder, table)


@pytest.mark.parametrize("architecture", [name for name in CONFIGS if "Masked" not in name])
def test_time_of_training_is_told_within_its_bounds(
    architecture: str, new_folder: Callable[[], Path], table: Table
) -> None:
    folder = new_folder()
    golden, options = folder / "golden", TrainOptions(model=str(folder / "model"))
    getattr(transformers, architecture)(CONFIGS[architecture]).save_pretrained(options.model)
    golden.mkdir()
    reference = ReferenceRequest(
        options=options, reference="cpu/float32", dtype="bfloat16", folder=str(golden)
    )
    candidate = TrainerRequest(
        options=options,
        candidate="cpu/bfloat16",
        golden=str(golden),
        folder=str(folder / "candidate"),
        trainer="reference",
    )

    name = f"training of {architecture}"
    assert_told_times(f"reference of {name}", REFERENCE, reference, folder, table)
    assert_told_times(f"candidate of {name}", TRAINER, candidate, folder, table)


def assert_told_times(
    row: str, function: RemoteFunction[Any, Any], request: object, folder: Path, table: Table
) -> None:
    """Run one side in a new process, as a check does: it must tell about the times that it takes."""
    told = Told()
    ask(function, request, folder, name="side", progress=told)
    first, later = told.errors()
    table.at_most(f"{row}: estimate", Times(first, first), 1.5, "or its inverse, of the time")
    table.at_most(f"{row}: after a quarter", Times(later, later), 0.3, "of the time, off")
