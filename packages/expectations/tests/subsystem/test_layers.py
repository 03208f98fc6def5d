"""The module that causes a change between two captures."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from assay.devices.run_string import parse_run
from assay.runs import SilentProgress
from assay_expectations.changes import change_as_markdown, find_change, judge_pair
from assay_expectations.observing import capture_signature, open_candidate
from assay_expectations.records import Expectation, Settings
from packages.expectations.tests.unit.sample_expectations import expectation

Plant = Callable[[nn.Module], object]
SETTINGS = Settings(num_prompts=4, max_new_tokens=4)


def capture(plant: Plant = lambda _model: None) -> Expectation:
    candidate = open_candidate("micro:llama", parse_run("cpu/bfloat16"), SETTINGS)
    plant(candidate.side.loaded.model)
    signed = capture_signature("micro:llama", candidate, SilentProgress())
    made = expectation()
    return made.model_copy(
        update={
            "key": candidate.key,
            "signature": signed.signature,
            "layers": signed.layers,
            "exact_layers": signed.exact_layers,
        }
    )


@pytest.fixture(scope="module")
def clean() -> Expectation:
    return capture()


def scaled(path: str) -> Plant:
    def plant(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule(path).get_parameter("weight").mul_(1.05)

    return plant


def changed(path: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda values: change(forward(values))

    return plant


def in_decode(values: Tensor) -> Tensor:
    return values * 1.1 if values.shape[1] == 1 else values


NORM = "model.layers.1.post_attention_layernorm"
DOWN = "model.layers.3.mlp.down_proj"


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        (scaled("model.layers.1.mlp.down_proj"), "model.layers.1.mlp.down_proj"),
        (scaled("model.layers.2.self_attn.v_proj"), "model.layers.2.self_attn.v_proj"),
        (changed(NORM, in_decode), NORM),
        (changed(DOWN, lambda values: values * float("nan")), DOWN),
        (scaled("lm_head"), "lm_head"),
    ],
    ids=["down_proj", "v_proj", "decode", "nan", "head"],
)
def test_break_names_the_first_module(clean: Expectation, plant: Plant, module: str) -> None:
    wrong = capture(plant)
    verdict, _, change = judge_pair(clean, wrong)

    assert change.kind == "break"
    assert change.grown[0].module == module
    assert verdict.location is not None
    assert verdict.location.module == module
    text = change_as_markdown(clean, wrong, change)
    first = text.split("| module | relative error before | now |\n|---|---|---|\n")[1]
    assert first.startswith(f"| {module} |")


def test_unchanged_model_names_no_module(clean: Expectation) -> None:
    again = capture()
    assert clean.layers.keys() == again.layers.keys()
    assert len(clean.layers) > 50
    assert find_change(clean, again).grown == []
