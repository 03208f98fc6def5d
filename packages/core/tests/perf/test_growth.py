"""How the time of commands grows with the work, on a quiet machine.

The slope is that of the logarithms between the two largest sizes, less the time of the smallest size, which is
mostly imports: 1 for linear growth.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.launch import World, call
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times
from packages.core.tests.perf.test_comparing_dumps import write_sparse
from packages.core.tests.perf.world_body import generate_texts

HEADS, PROMPT, NEW_TOKENS = 8, 20, 80
# Linear growth, and chance.
STEEPEST = 1.1


def write_llama(folder: Path, num_layers: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=num_layers, vocab_size=1000,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_prompts(path: Path, num_prompts: int) -> Path:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 1000, (num_prompts, PROMPT), generator=generator)
    path.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows.tolist()))
    return path


def seconds_of(*command: str) -> float:
    """Run a command of assay, each process on one thread, and return its time by the clock.

    The system tells nobody the processor time of what the fork server starts.
    """
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "assay.cli", *command],
        check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return time.perf_counter() - started


def seconds_of_check(folder: Path, *, layers: int = 4, prompts: int = 8, ranks: int = 1) -> float:
    folder.mkdir()
    model = write_llama(folder / "model", layers)
    texts = write_prompts(folder / "prompts.jsonl", prompts)
    mesh = ("--mesh", f"tp={ranks}") if ranks > 1 else ()
    return seconds_of(
        "check", "generate", str(model), "--reference", "cpu/float32", "--candidate", "cpu/bfloat16",
        "--prompts", str(texts), "--max-new-tokens", str(NEW_TOKENS), "--output",
        str(folder / "run"), *mesh,
    )  # fmt: skip


def seconds_of_comparison(folder: Path, gigabytes: float) -> float:
    folder.mkdir()
    sides = [
        str(write_sparse(folder / side, int(gigabytes * 500_000_000)))
        for side in ("golden", "mine")
    ]
    return seconds_of("compare", *sides, "--output", str(folder / "run"))


@pytest.mark.parametrize(
    ("what", "sizes", "seconds_at"),
    [
        (
            "tokens of a check",
            (100, 1_000, 10_000),
            lambda folder, size: seconds_of_check(folder, prompts=size // (PROMPT + NEW_TOKENS)),
        ),
        ("layers of a check", (4, 16, 64), lambda folder, size: seconds_of_check(folder, layers=size)),
        ("GB of two dumps", (0.1, 2, 20), seconds_of_comparison),
    ],
)  # fmt: skip
def test_cost_grows_no_faster_than_the_work(
    what: str,
    sizes: tuple[float, ...],
    seconds_at: Callable[[Path, float], float],
    tmp_path: Path,
    table: Table,
) -> None:
    times = {}
    for size in sizes:
        times[size] = seconds_at(tmp_path / f"{size}", size)

    (least, imports), *_, (few, short), (many, long) = times.items()
    slope = math.log((long - imports) / (short - imports)) / math.log(
        (many - least) / (few - least)
    )
    note = ", ".join(f"{size:,}: {seconds:.1f} s" for size, seconds in times.items())
    table.at_most(f"slope: {what}", Times(slope, slope), STEEPEST, note)


def test_cost_over_ranks_grows_no_faster_than_generation(tmp_path: Path, table: Table) -> None:
    """Exchanges between more processes than cores are slow, in any program: compare with plain ones.

    Each rank measures whole values and is judged by itself, so the check grows somewhat faster: 14 %
    from 4 to 8 ranks on two cores.
    """
    sizes = (1, 2, 4, 8)
    times = {size: seconds_of_check(tmp_path / f"{size}", ranks=size) for size in sizes}
    work = tmp_path / "1/model", tmp_path / "1/prompts.jsonl", NEW_TOKENS
    plain = {size: max(call(generate_texts, work, world=World({"tp": size}))) for size in sizes}

    few, many = ((times[size] - times[1]) / plain[size] for size in sizes[-2:])
    note = ", ".join(f"{size}: {times[size]:.1f} of {plain[size]:.1f} s" for size in sizes)
    slope = math.log(many / few) / math.log(sizes[-1] / sizes[-2])
    table.at_most("slope: check / generation over ranks", Times(slope, slope), 0.3, note)
