"""The cost of `assay check generate` of models that compute for minutes, beside plain generation.

Times are one run each, by the clock: both sides use all cores.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.generate.golden import GoldenSection
from assay.inputs import Batch
from assay.models import count_parameters
from assay.models.load import limited_threads
from packages.core.tests.perf.anonymous_memory import Peaks, anonymous_memory, highest_memory
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times

# Of 134 M parameters, and in the shape of Llama-3.2-1B.
SMALL = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=2048,
    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
BIG = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, vocab_size=128_256, max_position_embeddings=4096,
    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
# Tokens of each prompt of BIG.
LENGTHS = (12, 24, 32, 20)


def write_model(config: LlamaConfig, folder: Path) -> Path:
    """Write random weights in bfloat16."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Check:
    """One run of the command."""

    folder: Path
    seconds: float
    memory: Peaks

    @classmethod
    def run(cls, model: Path, folder: Path, *options: str) -> "Check":
        command = [sys.executable, "-m", "assay.cli", "check", "generate", str(model)]
        command += ["--reference", "cpu/float32", "--candidate", "cpu/bfloat16"]
        started = time.perf_counter()
        with (
            subprocess.Popen(
                [*command, "--output", str(folder), *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as process,
            highest_memory(process.pid, interval_seconds=0.2) as memory,
        ):
            process.wait()
        return cls(folder, time.perf_counter() - started, memory)

    @property
    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return verdict

    def generate_plainly(self, model: Path, *dtypes: torch.dtype) -> float:
        """Generate the texts of the check once in each dtype, as a script would; seconds."""
        batches = GoldenSection.open(self.folder / "golden", "bfloat16").batches
        with limited_threads(os.cpu_count() or 1):
            return sum(
                Times.of(partial(generate_batches, model, dtype, batches)).wall for dtype in dtypes
            )


def generate_batches(folder: Path, dtype: torch.dtype, batches: Sequence[Batch]) -> None:
    """Load the model and generate all batches, as a script would."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    for batch in batches:
        model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=batch.max_new_tokens,
            min_new_tokens=batch.max_new_tokens,
            prefill_chunk_size=batch.prefill_chunk,
            do_sample=False,
        )


@dataclass(frozen=True, slots=True)
class SmallRuns:
    """Runs of the model of 134 M parameters."""

    clean: Check
    located: Check
    """With a wrong operation, which the check names."""
    num_parameters: int
    plain: float
    """Seconds of the three generations: yardstick, noise run, candidate."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    runs = tmp_path_factory.mktemp("runs")
    model = write_model(SMALL, runs / "model")
    clean = Check.run(model, runs / "clean")
    assert clean.verdict["verdict"] == "PASS", clean.verdict
    plant = ("--candidate-setup", "examples/down_proj_scaled.py:plant")
    located = Check.run(model, runs / "planted", *plant)
    assert located.verdict["location"]["op"], located.verdict
    plain = clean.generate_plainly(model, torch.float64, torch.bfloat16, torch.bfloat16)
    num_parameters = count_parameters(str(model))
    return SmallRuns(clean, located, num_parameters, plain)


def assert_few_generations(
    what: str, check: Check, plain: float, bound: float, table: Table
) -> None:
    ratio = check.seconds / plain
    size = sum(file.stat().st_size for file in check.folder.rglob("*") if file.is_file())
    note = f"{check.seconds:.0f} s for generations of {plain:.0f} s; {size / 1e9:.1f} GB of files"
    table.at_most(what, Times(ratio, ratio), bound, note)


def test_check_costs_few_generations(small: SmallRuns, table: Table) -> None:
    assert_few_generations("whole check of 134 M parameters", small.clean, small.plain, 4, table)


def test_check_names_an_operation_in_few_generations(small: SmallRuns, table: Table) -> None:
    assert_few_generations("the same with a wrong operation", small.located, small.plain, 5, table)


def test_check_takes_little_more_memory_than_the_yardstick(small: SmallRuns, table: Table) -> None:
    vocabulary = SMALL.vocab_size
    assert isinstance(vocabulary, int)
    batches = GoldenSection.open(small.clean.folder / "golden", "bfloat16").batches
    call = max(batch.input_ids.numel() for batch in batches) * vocabulary * 8
    allowed = small.num_parameters * 8 + call + 500e6
    taken = small.clean.memory.largest - bytes_of_imports()
    share = taken / allowed
    note = f"{taken / 1e9:.2f} of {allowed / 1e9:.2f} GB: weights and logits in float64, 500 MB"
    table.at_most("its memory over imports", Times(share, share), 1, note)


def bytes_of_imports() -> int:
    """Return the anonymous memory of a process that has imported what the reference needs."""
    modules = "assay.generate.capture, transformers.models.llama.modeling_llama"
    program = f"import {modules}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = anonymous_memory(process.pid).largest
        process.communicate(b"\n")
    return found


def test_a_model_larger_than_its_memory_is_checked_in_few_generations(
    tmp_path: Path, table: Table
) -> None:
    model = write_model(BIG, tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, BIG.vocab_size, (length,), generator=generator) for length in LENGTHS]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": row.tolist()}) + "\n" for row in rows))
    options = ("--memory", "8G", "--max-new-tokens", "8", "--prompts", str(prompts))

    check = Check.run(model, tmp_path / "run", *options)

    assert check.verdict["verdict"] == "PASS", check.verdict
    plain = check.generate_plainly(model, torch.float32, torch.bfloat16)
    assert_few_generations("whole check of 1.2 B parameters", check, plain, 6, table)
    share = check.memory.together / 8e9
    note = f"{check.memory.together / 1e9:.1f} GB, all processes"
    table.at_most("its memory within --memory 8G", Times(share, share), 1, note)
