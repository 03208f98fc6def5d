"""The bodies of worlds, in a file of their own because every rank imports it."""

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

from assay.launch import Rank
from assay.parallel.tensor_parallel import apply_tensor_parallel
from assay.progress import Progress


def add_up(_request: None, _progress: Progress, rank: Rank) -> float:
    value = torch.tensor(float(rank.number))
    dist.all_reduce(value)
    return float(value)


def generate_texts(request: tuple[Path, Path, int], _progress: Progress, rank: Rank) -> float:
    """Generate with a tensor-parallel model, as a script would; seconds, without loading.

    request: folder of the model, file of prompts, number of new tokens.
    """
    folder, prompts, new_tokens = request
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    apply_tensor_parallel(model, rank.mesh["tp"])
    rows = [json.loads(line)["ids"] for line in prompts.read_text().splitlines()]
    started = time.perf_counter()
    model.generate(
        torch.tensor(rows), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    return time.perf_counter() - started
