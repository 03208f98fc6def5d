"""Faults drawn by seed from every corpus fail by themselves: `nox -s faults -- --corpus reproductions`."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.models import resolve_model
from packages.core.tests.faults.corpus import corpus
from packages.core.tests.faults.published.corpus import planted_bugs
from packages.core.tests.faults.published.models import make_model
from packages.core.tests.faults.published.planted import Planted
from packages.core.tests.faults.published.test_loads import CHAT, under_new_name, with_template
from packages.core.tests.faults.training_corpus import TrainingFault, training_corpus
from packages.core.tests.subsystem.commands import run_alone, run_in_process

pytestmark = pytest.mark.timeout(7200)

# Of twenty.
FEWEST_REPRODUCED = 18
DRAWN = {"generation": 6, "training": 6, "published": 4, "load": 4}
MOST_BYTES, MOST_LINES = 2**20, 120


@dataclass(frozen=True)
class Fault:
    """A fault of any corpus, and the arguments of the check that finds it, whose models are in a folder."""

    name: str
    arguments: Callable[[Path], list[str]]


def _sides(dtype: str) -> list[str]:
    return ["--reference", "cpu/float32", "--candidate", f"cpu/{dtype}", "--keep", "replay"]


def _generation() -> Iterator[Fault]:
    for one in corpus():
        options = ["--candidate-setup", one.setup, "--max-new-tokens", "12"]
        arguments = ["check", "generate", f"micro:{one.recipe}", *_sides(one.dtype), *options]
        yield Fault(one.name, lambda _, arguments=arguments: arguments)  # type: ignore[misc]


def _training() -> Iterator[Fault]:
    for one in training_corpus():
        if one.adapter_dropout is None:  # no option of the command
            yield Fault(one.name, lambda _, one=one: _trained(one))  # type: ignore[misc]


def _trained(one: TrainingFault) -> list[str]:
    options = _features(one.mesh, one.features, one.micro_batches)
    return [
        "check", "train", one.model, *_sides(one.dtype),
        "--candidate-trainer" if one.trainer else "--candidate-setup", one.reference,
        *options, *["--lora"] * one.lora,
    ]  # fmt: skip


def _features(mesh: str, features: tuple[str, ...], micro_batches: int) -> list[str]:
    of_mesh = ["--mesh", mesh] if mesh else []
    return [*of_mesh, *(f"--{name}" for name in features), "--micro-batches", str(micro_batches)]


def _published() -> Iterator[Fault]:
    for one in planted_bugs():
        for dtype in one.dtypes:
            yield Fault(
                f"{one.bug} {one.plant} {dtype}",
                lambda folder, one=one, dtype=dtype: _planted(one, dtype, folder),  # type: ignore[misc]
            )


def _planted(one: Planted, dtype: str, folder: Path) -> list[str]:
    model, plant = make_model(one.model, folder / "model"), one.reference_of(one.plant)
    trusted = ["--trust-remote-code"] if one.remote_code == "trust" else []
    training = one.training
    if training is None:
        options = ["--candidate-setup", plant, "--max-new-tokens", "12", *trusted]
        return ["check", "generate", model, *_sides(dtype), *options]
    is_class = one.plant.partition(":")[2][0].isupper()
    options = _features(training.mesh, training.features, training.micro_batches)
    rate = ["--learning-rate", str(training.learning_rate)]
    return [
        "check", "train", model, *_sides(dtype),
        "--candidate-trainer" if is_class else "--candidate-setup", plant, *options, *rate, *trusted,
    ]  # fmt: skip


_CODE = """
import torch
from transformers import LlamaForCausalLM

class Wrong(LlamaForCausalLM):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        layer = model.model.layers[1]
        with torch.no_grad():
            {line}
        return loaded
"""
_LINES = {
    "row_zeroed": "layer.mlp.down_proj.weight[5] = 0",
    "neighbours_values": "layer.self_attn.v_proj.weight.copy_(layer.self_attn.k_proj.weight)",
    "transposed": "w = layer.self_attn.q_proj.weight; w.copy_(w.t().clone())",
    "two_percent": "layer.mlp.up_proj.weight.mul_(1.02)",
    "through_float8": "w = layer.mlp.up_proj.weight; w.copy_(w.to(torch.float8_e4m3fn).to(w.dtype))",
    "initialized_again": "torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.1)",
    "embedding_row_shifted": "w = model.model.embed_tokens.weight; w.copy_(w.roll(1, 0))",
    "head_not_loaded": "model.lm_head.weight.zero_()",
    "norm_plus_one": "model.model.norm.weight.add_(1)",
    "inverse_frequency_halved": "model.model.rotary_emb.inv_freq.mul_(0.5)",
}
_FILES = {
    "rope_under_new_name": under_new_name,
    "double_bos": with_template("{{ bos_token }}" + CHAT),
}


def _load() -> Iterator[Fault]:
    for name in (*_LINES, *_FILES):
        yield Fault(name, lambda folder, name=name: _loaded(name, folder / "model"))  # type: ignore[misc]


def _loaded(name: str, model: Path) -> list[str]:
    if name in _FILES:
        _FILES[name](Path(make_model("llama, theta 500000", model)))
        return ["check", "load", str(model)]
    recipe = resolve_model("micro:llama").recipe
    assert recipe is not None
    shutil.copytree(recipe.folder, model)
    (model / "wrong.py").write_text(_CODE.format(line=_LINES[name]))
    settings = json.loads((model / "config.json").read_text())
    code = {"architectures": ["Wrong"], "auto_map": {"AutoModelForCausalLM": "wrong.Wrong"}}
    (model / "config.json").write_text(json.dumps({**settings, **code}))
    return ["check", "load", str(model), "--trust-remote-code"]


POPULATIONS: dict[str, Callable[[], Iterator[Fault]]] = {
    "generation": _generation,
    "training": _training,
    "published": _published,
    "load": _load,
}


def _describe_reproduction(run: Path, output: Path) -> tuple[bool, str]:
    """Whether a FAIL is reproduced, and in words how."""
    made = run_in_process(output, "reproduce", run)
    if made.code:
        return False, made.stderr.splitlines()[-1]
    script = output / "reproduce.py"
    codes = run_alone(script)[0], run_alone(script, "--reference")[0]
    names = ("reproduce.py", "tensors.pt", "README.md", "environment.json")
    num_bytes = sum((output / name).stat().st_size for name in names)
    num_lines = len(script.read_text().splitlines())
    is_small = num_bytes <= MOST_BYTES and num_lines < MOST_LINES
    return codes == (1, 0) and is_small, f"{codes}, {num_lines} lines, {num_bytes:,} bytes"


def test_drawn_faults_fail_by_themselves(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seed, missed = request.config.getoption("--draw"), []
    terminal = request.config.get_terminal_writer()
    for kind, num_drawn in DRAWN.items():
        faults, drawn = list(POPULATIONS[kind]()), 0
        random.Random(f"{seed} {kind}").shuffle(faults)  # noqa: S311 - a draw of faults
        for fault in faults:
            folder = tmp_path / kind
            checked = run_in_process(folder / "run", *fault.arguments(folder))
            if checked.code == 1:  # others are below the resolution that the verdict states
                found, words = _describe_reproduction(folder / "run", folder / "alone")
                terminal.line(f"{fault.name}: {'found' if found else 'MISSED'}, {words}")
                missed += [] if found else [fault.name]
                drawn += 1
            shutil.rmtree(folder)
            if drawn == num_drawn:
                break
    assert len(missed) <= sum(DRAWN.values()) - FEWEST_REPRODUCED, missed
