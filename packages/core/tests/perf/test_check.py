"""The cost of a whole check compared with the generations that it consists of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from assay.devices.run_string import Run
from assay.generate.candidate import run_candidate
from assay.generate.capture import capture_golden
from assay.generate.golden import GenerateEvidence, GoldenSection
from assay.generate.judging import judge_generation
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.runs import SilentProgress
from assay.trace import Trace
from packages.core.tests.perf.anonymous_memory import highest_memory
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
    golden = folder / "golden"
    capture = GoldenSpec(
        model=str(model_folder),
        reference=Run("cpu", "float32"),
        noise_for=["float32"],
        inputs=inputs,
        folder=golden,
    )
    capture_golden(capture, SilentProgress())
    check = GenerateCheck(
        model=str(model_folder), candidate=Run("cpu", "float32"), golden=golden, folder=folder
    )
    report = run_candidate(check, SilentProgress())
    section = GoldenSection.open(golden, "float32")
    evidence = GenerateEvidence(check, section, Trace.open(check.candidate_folder), report)
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


def write_prompts(path: Path, input_ids: torch.Tensor, num_batches: int) -> Path:
    """As many batches of prompts, none like another: equal content is stored once."""
    rows = [ids for shift in range(num_batches) for ids in (input_ids + shift).tolist()]
    path.write_text(
        "".join(json.dumps({"ids": [i % VOCABULARY for i in ids]}) + "\n" for ids in rows)
    )
    return path


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
        peaks.append(highest.largest)
    grown = [pair[1] - pair[0] for pair in (traces, peaks)]
    assert grown[0] > 0

    share = grown[1] / grown[0]
    table.at_most(
        what, Times(share, share), bound,
        f"{grown[1] / MEBIBYTE:.0f} MiB more memory for {grown[0] / MEBIBYTE:.0f} MiB more trace;"
        f" highest {peaks[1] / MEBIBYTE:.0f} MiB",
    )  # fmt: skip
