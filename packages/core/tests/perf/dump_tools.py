"""What `test_comparing_dumps.py` runs in processes of their own: msprobe changes torch where it is imported."""

import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from packages.core.tests.perf.anonymous_memory import anonymous_memory, highest_memory
from packages.core.tests.perf.conftest import BATCH, LENGTH, VOCABULARY, llama

PASSES = 5


def dump_with_msprobe(folder: Path) -> dict[str, float]:
    """Dump one forward pass of the model: all tensors of modules and operations."""
    from msprobe.pytorch import PrecisionDebugger

    task = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    config = folder.with_suffix(".config.json")
    config.write_text(
        json.dumps({"task": "tensor", "rank": [], "step": [], "level": "mix", "tensor": task})
    )
    model, forward = _make_forward()
    plain = _measure(forward)["wall"]
    debugger = PrecisionDebugger(config_path=str(config), dump_path=str(folder))

    def dump() -> None:
        debugger.start(model=model)
        forward()
        debugger.stop()
        debugger.step()

    return _measure(dump) | {"forward": plain}


def capture_with_assay(folder: Path) -> dict[str, float]:
    """Capture passes of the model, with copies of at most 64 MB in memory."""
    import assay

    model, forward = _make_forward()
    plain = _measure(forward)["wall"]

    def capture() -> None:
        with assay.capture(model, folder, max_memory="64M"):
            for _ in range(PASSES):
                forward()

    found = _measure(capture)
    return found | {"wall": found["wall"] / PASSES, "forward": plain}


def _make_forward() -> tuple[LlamaForCausalLM, Callable[[], None]]:
    """Return the model and a pass of it, each with other tokens, that has run once."""
    model = llama()
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator))

    forward()
    return model, forward


def compare_with_msprobe(expected: Path, actual: Path, output: Path) -> dict[str, float]:
    """Measure msprobe's comparison without its imports."""
    from msprobe.core.compare.utils import compare_distributed_inner
    from msprobe.pytorch.compare import pt_compare  # noqa: F401 - imported by the comparison

    # It starts one process for each four cores, which import it again unless they are forked.
    multiprocessing.set_start_method("fork", force=True)
    steps = [str(side / "step0") for side in (actual, expected)]
    return _measure(lambda: compare_distributed_inner(*steps, str(output)))


def compare_with_assay(expected: Path, actual: Path, output: Path) -> dict[str, float]:
    """Measure assay's comparison without its imports."""
    from assay.comparison.check import CompareOptions, compare
    from assay.runs import SilentProgress

    output.mkdir()
    comparison = CompareOptions(str(expected), str(actual))
    return _measure(lambda: compare(comparison, output, SilentProgress()))


def run_whole_command(expected: Path, actual: Path, output: Path) -> dict[str, float]:
    """Measure assay's comparison with its report, without imports."""
    import assay
    import assay.api.verdict

    return _measure(lambda: assay.compare(expected, actual, output=output))


def read_files(expected: Path, actual: Path, _: Path) -> dict[str, float]:
    """Measure how fast the files are read that are in the page cache."""
    buffer = bytearray(1 << 20)

    def read() -> None:
        for side in (expected, actual):
            for path in side.rglob("*.pt"):
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass

    read()
    return _measure(read)


def _measure(work: Callable[[], object]) -> dict[str, float]:
    """Return seconds by the clock and of processors, and the most anonymous memory over that of now."""
    before = anonymous_memory(os.getpid()).largest
    with highest_memory() as peaks:
        clock, processor = time.perf_counter(), _processor_seconds()
        work()
        clock, processor = time.perf_counter() - clock, _processor_seconds() - processor
    return {"wall": clock, "cpu": processor, "anonymous": peaks.largest - before}


def _processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usages)


_TOOLS: dict[str, Callable[..., dict[str, float]]] = {
    "dump": dump_with_msprobe,
    "capture": capture_with_assay,
    "msprobe": compare_with_msprobe,
    "assay": compare_with_assay,
    "command": run_whole_command,
    "read": read_files,
}

if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    folders = [Path(path) for path in paths]
    result = _TOOLS[name](*folders)
    Path(f"{folders[-1]}.json").write_text(json.dumps(result))
