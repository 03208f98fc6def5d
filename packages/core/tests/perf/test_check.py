"""The cost of a whole check compared with the generations that it consists of."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.comparing.limits import load_limits
from assay.devices.run_string import Run
from assay.generate.judging.evidence import GenerateEvidence
from assay.generate.judging.verdict import judge_generation
from assay.generate.processes.candidate import run_candidate
from assay.generate.processes.golden import capture_golden
from assay.generate.processes.golden_folder import GoldenSection, read_golden
from assay.generate.processes.requests import CandidateRequest, GoldenRequest, InputOptions
from assay.inputs import Batch
from assay.models.size import limited_threads
from assay.runs import SilentProgress
from assay.trace import Trace
from packages.core.tests.perf.conftest import VOCABULARY, Table
from packages.core.tests.perf.stopwatch import Times, median_ratio, take_turns

ROUNDS = 3
NEW_TOKENS = 32
MEBIBYTE = 2**20


def whole_check(model_folder: Path, prompts: Path, folder: Path, new_tokens: int) -> Trace:
    """All that the two processes of `assay check generate` do, and the judge; the golden's trace.

    Returns after a PASS: a FAIL would be followed by more.
    """
    inputs = InputOptions(prompts=str(prompts), batch_size=2, max_new_tokens=new_tokens)
    golden, actual = folder / "golden", folder / "candidate"
    capture = GoldenRequest(
        model=str(model_folder),
        reference=Run("cpu", "float32"),
        noise_for=["float32"],
        inputs=inputs,
        folder=str(golden),
    )
    capture_golden(capture, SilentProgress())
    candidate = CandidateRequest(
        model=str(model_folder),
        candidate=Run("cpu", "float32"),
        golden=str(golden),
        folder=str(actual),
    )
    report = run_candidate(candidate, SilentProgress())
    section = GoldenSection.open(golden, "float32")
    evidence = GenerateEvidence(
        read_golden(golden), section, Trace.open(actual), report, load_limits("noise")
    )
    assert judge_generation(evidence).verdict.verdict == "PASS"
    return section.trace


def plain_generation(
    model_folder: Path, dtype: torch.dtype, input_ids: torch.Tensor, new_tokens: int
) -> None:
    """Load the model and generate, as a script would."""
    model: Any = LlamaForCausalLM.from_pretrained(
        model_folder, dtype=dtype, attn_implementation="eager"
    )
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )


def test_check_costs_little_more_than_its_three_generations(
    model_folder: Path,
    prompts: Path,
    input_ids: torch.Tensor,
    new_folder: Callable[[], Path],
    table: Table,
) -> None:
    def check() -> None:
        whole_check(model_folder, prompts, new_folder(), NEW_TOKENS)

    dtypes = (torch.float64, torch.float32, torch.float32)

    def generate_plainly() -> None:
        for dtype in dtypes:
            plain_generation(model_folder, dtype, input_ids, NEW_TOKENS)

    times = take_turns({"check": check, "plain": generate_plainly}, ROUNDS)

    table.at_most(
        "whole check", median_ratio(times["check"], times["plain"]), 3.5,
        f"yardstick, noise run and candidate load and generate {NEW_TOKENS} tokens",
    )  # fmt: skip


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 layers, 134 M parameters, random, in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("large")
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


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
class LargeCosts:
    """Seconds of one run each, by the clock: all compute for minutes on all cores."""

    plain: float
    """Of the three generations."""
    check: float
    located: float
    """Of a check that names a wrong operation."""
    size_bytes: int
    """Of the files of a check."""

    def over_plain(self, seconds: float) -> tuple[Times, str]:
        """How many times as long as the generations, and a note."""
        ratio = seconds / self.plain
        note = f"{seconds:.0f} s for three generations of {self.plain:.0f} s"
        return Times(ratio, ratio), note


@pytest.fixture(scope="module")
def large_costs(large_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LargeCosts:
    runs = tmp_path_factory.mktemp("runs")
    folder, failed = runs / "clean", runs / "planted"
    command = [sys.executable, "-m", "assay.cli", "check", "generate", str(large_folder)]
    command += ["--reference", "cpu/float32", "--candidate", "cpu/bfloat16", "--output"]
    check = Times.of(
        lambda: subprocess.run([*command, str(folder)], check=True, capture_output=True)
    )
    planted = [*command, str(failed), "--candidate-setup", "examples/down_proj_scaled.py:plant"]
    located = Times.of(lambda: subprocess.run(planted, check=False, capture_output=True))
    verdict = json.loads((failed / "verdict.json").read_text())
    assert verdict["location"]["op"], verdict
    batches = GoldenSection.open(folder / "golden", "bfloat16").batches

    def generate_plainly() -> None:
        for dtype in (torch.float64, torch.bfloat16, torch.bfloat16):
            generate_batches(large_folder, dtype, batches)

    with limited_threads(os.cpu_count() or 1):
        plain = Times.of(generate_plainly)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return LargeCosts(plain.wall, check.wall, located.wall, size)


def test_check_of_a_large_model_costs_few_generations(
    large_costs: LargeCosts, table: Table
) -> None:
    ratio, note = large_costs.over_plain(large_costs.check)
    note += f"; {large_costs.size_bytes / 1e9:.1f} GB of files"
    table.at_most("whole check of 134 M parameters", ratio, 3.5, note)


def test_check_of_a_large_model_names_an_operation_in_few_generations(
    large_costs: LargeCosts, table: Table
) -> None:
    ratio, note = large_costs.over_plain(large_costs.located)
    table.at_most("the same with a wrong operation", ratio, 4.0, note)


def write_prompts(path: Path, input_ids: torch.Tensor, num_batches: int) -> Path:
    """As many batches of prompts, none like another: equal content is stored once."""
    rows = [ids for shift in range(num_batches) for ids in (input_ids + shift).tolist()]
    path.write_text(
        "".join(json.dumps({"ids": [i % VOCABULARY for i in ids]}) + "\n" for ids in rows)
    )
    return path


@contextmanager
def highest_memory() -> Iterator[list[int]]:
    """Of this process: bytes that are no pages of a file, sampled every 5 ms, at their highest.

    Pages of a trace that is mapped are given back when memory is short.
    """
    highest, over = [0], threading.Event()

    def tracer() -> None:
        while not over.is_set():
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    highest[0] = max(highest[0], int(line.split()[1]) * 1024)
            time.sleep(0.005)

    thread = threading.Thread(target=tracer)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read memory from")
@pytest.mark.parametrize(
    ("what", "sizes", "bound"),
    [
        # A text is read in one call, whose logits, in float64, are held a few times.
        ("memory that grows with the text", ((1, 4), (1, 32)), 1.5),
        ("memory that grows with the batches", ((1, 16), (4, 16)), 0.1),
    ],
)
def test_memory_does_not_grow_with_the_trace(
    model_folder: Path,
    input_ids: torch.Tensor,
    prompts: Path,
    new_folder: Callable[[], Path],
    table: Table,
    what: str,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    bound: float,
) -> None:
    traces, peaks = [], []
    whole_check(model_folder, prompts, new_folder(), 2)
    for num_batches, new_tokens in sizes:
        several = write_prompts(new_folder().with_suffix(".jsonl"), input_ids, num_batches)
        with highest_memory() as highest:
            trace = whole_check(model_folder, several, new_folder(), new_tokens)
        traces.append(trace.unique_bytes)
        peaks.append(highest[0])
    grown = [pair[1] - pair[0] for pair in (traces, peaks)]
    assert grown[0] > 0

    share = grown[1] / grown[0]
    table.at_most(
        what, Times(share, share), bound,
        f"{grown[1] / MEBIBYTE:.0f} MiB more memory for {grown[0] / MEBIBYTE:.0f} MiB more trace;"
        f" highest {peaks[1] / MEBIBYTE:.0f} MiB",
    )  # fmt: skip
