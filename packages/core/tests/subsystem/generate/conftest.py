"""Whole commands on a micro model: one golden for all tests, each candidate in its own process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.core.tests.subsystem.commands import Finished, run_in_process

MODEL = "micro:llama"
LINES = (
    "def read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n",
    "The quick brown fox jumps over the lazy dog, and the dog does not even look up.",
    "import os\nimport sys\n\n\nclass Reader:\n    '''Reads what was written.'''\n",
    "for number in range(10):\n    print(number * number)\n",
    "Return the largest item of an iterable, or of two or more arguments.",
    "raise ValueError(f'expected a number, got {value!r}')",
    "A table: 1, 2, 3; 10, 20, 30; 100, 200, 300. The next row is 1000",
    "if not isinstance(other, type(self)):\n    return NotImplemented\nreturn self.x == other.x",
)


RunAssay = Callable[..., Finished]


@pytest.fixture
def assay(tmp_path: Path) -> RunAssay:
    """Run `assay ARGUMENTS --output FOLDER`; by default the folder is a new one."""

    def run(*arguments: str | Path, output: Path | None = None) -> Finished:
        number = len(list(tmp_path.glob("run-*")))
        return run_in_process(output or tmp_path / f"run-{number}", *arguments)

    return run


@pytest.fixture
def prompt_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "p.jsonl"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="session")
def golden(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden of `MODEL` for candidates in bfloat16 and float32."""
    folder = tmp_path_factory.mktemp("goldens") / "golden"
    captured = run_in_process(
        folder, "capture", MODEL, "--run", "cpu/float32", "--noise-for", "bfloat16,float32",
        "--prompts", prompts, "--max-new-tokens", "8",
    )  # fmt: skip
    assert captured.code == 0, captured.stderr
    return folder


@pytest.fixture(scope="session")
def clean(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A healthy candidate in bfloat16, with `--json`."""
    return run_in_process(
        tmp_path_factory.mktemp("clean") / "run", "check", "generate", MODEL, "--golden", golden,
        "--candidate", "cpu/bfloat16", "--json",
    )  # fmt: skip


@pytest.fixture
def check(assay: RunAssay, golden: Path) -> RunAssay:
    """`assay check generate` of a candidate, bfloat16 by default, against the golden."""

    def run(
        *arguments: str | Path, candidate: str = "cpu/bfloat16", output: Path | None = None
    ) -> Finished:
        return assay(
            "check", "generate", MODEL, "--golden", golden, "--candidate", candidate, *arguments,
            output=output,
        )  # fmt: skip

    return run


SETUPS = '''
import torch
import torch.nn.functional as F

DOWN = "model.layers.1.mlp.down_proj"


def _scale_weights(model, factor):
    with torch.no_grad():
        model.get_submodule(DOWN).weight.mul_(factor)


def _scale_outputs(model, factor):
    """In float32, then rounded: the product of two bfloat16 numbers near 1 is the first."""
    linear = model.get_submodule(DOWN)
    def forward(x):
        exact = F.linear(x.double(), linear.weight.double()) * factor
        return exact.to(x.dtype)
    linear.forward = forward


def _spoil_logits(model, value):
    head = model.get_submodule("lm_head")
    forward = head.forward
    def spoiled(x):
        logits = forward(x).clone()
        logits[..., 7] = value
        return logits
    head.forward = spoiled


def positions_shifted(model):
    """Every query and key is turned by as much more: no score changes."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids + 7)


def rows_zeroed(model):
    """No prompt has a byte below 8."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:8] = 0


def rows_zeroed_and_units_permuted(model):
    rows_zeroed(model)
    hidden_units_permuted(model)


def hidden_units_permuted(model):
    mlp = model.get_submodule("model.layers.1.mlp")
    with torch.no_grad():
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.copy_(linear.weight.flip(0))
        mlp.down_proj.weight.copy_(mlp.down_proj.weight.flip(1))


def _scale_in_inference_mode(model, factor):
    """The result is changed in place, in a mode in which torch does not count such changes."""
    mlp = model.get_submodule("model.layers.1.mlp")
    forward = mlp.forward
    def scaled(x):
        with torch.inference_mode():
            result = forward(x)
            result *= factor
            return result
    mlp.forward = scaled


def scaled_in_inference_mode(model):
    _scale_in_inference_mode(model, 1.02)


def run_in_inference_mode(model):
    _scale_in_inference_mode(model, 1.0)


def keys_102(model):
    with torch.no_grad():
        model.get_submodule("model.layers.1.self_attn.k_proj").weight.mul_(1.02)


def keys_102_and_no_differences(model):
    """Of logits in float64, which acquit a stage."""
    keys_102(model)
    subtract = torch.Tensor.__sub__
    def patched(one, other):
        difference = subtract(one, other)
        is_logits = difference.dtype is torch.float64 and difference.ndim == 3
        return torch.zeros_like(difference) if is_logits else difference
    torch.Tensor.__sub__ = patched


def _change_output(model, change):
    generate = model.generate
    def changed(*args, **kwargs):
        result = generate(*args, **kwargs)
        return change(result) if hasattr(result, "sequences") else result
    model.generate = changed


def two_tokens_fewer(model):
    def cut(result):
        result.sequences, result.logits = result.sequences[:, :-2], result.logits[:-2]
        return result
    _change_output(model, cut)


def no_output(model):
    _change_output(model, lambda result: None)


def raises_in_generate(model):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")
    model.generate = broken


def padding_made_nonfinite(model):
    """One layer leaves NaN where nothing is to be seen; attention multiplies it by zero later."""
    layer = model.get_submodule("model.layers.1")
    forward = layer.forward
    def spoiled(hidden, *args, **kwargs):
        output = forward(hidden, *args, **kwargs)
        mask = kwargs["attention_mask"]
        if mask is None or output.shape[1] == 1:
            return output
        seen = mask.diagonal(dim1=-2, dim2=-1)[:, 0, :, None]
        seen = seen if seen.dtype is torch.bool else seen == 0
        return output.masked_fill(~seen, float("nan"))
    layer.forward = spoiled


def outputs_102_in_decode(model):
    linear = model.get_submodule(DOWN)
    forward = linear.forward
    linear.forward = lambda x: forward(x) * (1.02 if x.shape[1] == 1 else 1.0)


def weights_102(model): _scale_weights(model, 1.02)
def outputs_1001(model): _scale_outputs(model, 1.001)
def outputs_100001(model): _scale_outputs(model, 1.00001)
def outputs_10002(model): _scale_outputs(model, 1.0002)
def outputs_1(model): _scale_outputs(model, 1.0)
def nan_logits(model): _spoil_logits(model, float("nan"))
def inf_logits(model): _spoil_logits(model, float("inf"))
def nothing(model): return None
def same(model): return model
def raises(model): raise RuntimeError("no such kernel")
def returns_text(model): return "done"
def exits(model): raise SystemExit(0)
not_callable = 3


def gone(model):
    """Every module is replaced by one whose call nobody sees."""
    class Silent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = [model]
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
            self.config, self.generation_config = model.config, model.generation_config
        def generate(self, *args, **kwargs):
            return model.generate(*args, **kwargs)
    return Silent()
'''


@pytest.fixture(scope="session")
def setups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of setup functions: planted faults, clean ones, and broken ones."""
    path = tmp_path_factory.mktemp("setups") / "setups.py"
    path.write_text(SETUPS)
    return path
