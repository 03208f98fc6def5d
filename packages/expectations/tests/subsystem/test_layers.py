"""The module that causes a change between two captures."""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import NullHandler
from assay.runs import SilentProgress
from assay_expectations.changes import change_as_markdown, find_change, judge_pair
from assay_expectations.judging import OUTPUT_LIMITS, judge_numbers
from assay_expectations.observing import capture_loaded, observe, open_candidate
from assay_expectations.records import CaptureOptions, Expectation, Settings

Plant = Callable[[nn.Module], object]
SETTINGS = Settings(num_prompts=4, max_new_tokens=4)


def capture(plant: Plant = lambda _model: None, model: str = "micro:llama") -> Expectation:
    candidate = open_candidate(model, parse_run("cpu/bfloat16"), SETTINGS)
    plant(candidate.side.loaded.model)
    options = CaptureOptions(model=model, run="cpu/bfloat16", settings=SETTINGS)
    return capture_loaded(options, candidate, SilentProgress())


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


def test_router_whose_second_output_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = capture(model="micro:mixtral")
    forward = cast("Callable[..., tuple[Tensor, Tensor, Tensor]]", MixtralTopKRouter.forward)

    def with_larger_scores(*given: object) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, indices = forward(*given)
        return logits, 1.001 * scores, indices

    monkeypatch.setattr(MixtralTopKRouter, "forward", with_larger_scores)
    change = find_change(before, capture(model="micro:mixtral"))
    assert change.moves_exact
    assert change.module == "model.layers.0.mlp.gate"


def test_mask_of_the_lowest_number_is_finite() -> None:
    settings = Settings(num_prompts=2, max_new_tokens=2, attention="eager")
    options = CaptureOptions(model="micro:llama", run="cpu/bfloat16", settings=settings)
    candidate = open_candidate("micro:llama", parse_run("cpu/bfloat16"), settings)
    layers = capture_loaded(options, candidate, SilentProgress()).exact_layers
    assert "model.layers.0 (input 2)" in layers
    assert all(math.isfinite(one) for values in layers.values() for one in values)


@pytest.fixture(scope="module", params=[BertModel, BertForSequenceClassification])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    request.param(config).save_pretrained(folder)
    return str(folder)


def test_outputs_of_a_model_without_logits_are_judged(encoder: str) -> None:
    def halve(model: nn.Module) -> None:
        (norm,) = (m for n, m in model.named_modules() if n.endswith("layer.1.output.LayerNorm"))
        with torch.no_grad():
            norm.get_parameter("weight").mul_(0.5)

    clean, again, wrong = (
        capture(plant, encoder) for plant in (lambda _: None, lambda _: None, halve)
    )
    ofs = {"last_hidden_state", "pooler_output"}, {"logits"}
    assert {one.removeprefix("output-") for one in clean.signature.outputs} in ofs
    same, changed = (
        judge_numbers(clean.signature, one.signature.captured, "bfloat16", OUTPUT_LIMITS)
        for one in (again, wrong)
    )
    assert [*same] == ["output-error", "output-worst", "output-whole"]
    assert {one.value for one in same.values()} == {1.0}
    assert all(one.failed for one in changed.values())
    assert find_change(clean, wrong).grown[0].module.endswith("layer.1.output.LayerNorm")


def test_an_output_that_is_gone_is_a_problem(encoder: str) -> None:
    candidate = open_candidate(encoder, parse_run("cpu/bfloat16"), SETTINGS)
    other = capture(model=encoder).signature.model_copy(update={"outputs": ["output-gone"]})
    with pytest.raises(UsageError, match=r"^the model returns output-.*output-gone was captured"):
        observe(candidate.side, candidate.plan.batches, other, UsageWatch(NullHandler()))


def test_other_outputs_are_another_content(encoder: str) -> None:
    made = capture(model=encoder)
    logits = made.model_copy(
        update={"signature": made.signature.model_copy(update={"outputs": []})}
    )
    change = find_change(made, logits)
    assert (change.kind, change.judged) == ("not compared", None)
    assert change.content == [f"outputs {', '.join(made.signature.outputs)} → logits"]
