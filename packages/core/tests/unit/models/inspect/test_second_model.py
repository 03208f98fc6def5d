"""What no file holds, compared with the class built from its configuration alone.

Each fault is the same in every load, as a changed loader makes it: a second load does not show it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from assay.judge.loaded import judge_load
from assay.models.inspect.report import LoadReport
from assay.models.transformers_calls import quiet_transformers
from assay.verdicts import Outcome
from packages.core.tests.unit.models.inspect.test_weights import (
    FREQUENCIES,
    SMALL,
    after_loading,
    inspected,
    named,
)

Change = Callable[[Any], None]
TINY = SMALL | {"hidden_size": 32, "max_position_embeddings": 32}


def tiny(model_type: str, folder: Path, **settings: Any) -> Path:
    config_class = transformers.CONFIG_MAPPING[model_type]
    known = {name: value for name, value in TINY.items() if hasattr(config_class(), name)}
    with quiet_transformers():
        config = config_class(**{**known, **settings})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def dynamic_rope(rope_type: str) -> dict[str, Any]:
    return {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}


def freeze_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq[3:6] = 0


def keep_frequencies_in_half(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def forget_original_frequencies(model: Any) -> None:
    model.model.rotary_emb.original_inv_freq *= 2


def scale_attention(model: Any) -> None:
    model.model.rotary_emb.attention_scaling *= 1.5


def scale_embedding(model: Any) -> None:
    model.model.embed_tokens.embed_scale *= 2


def shift_positions(model: Any) -> None:
    model.bert.embeddings.position_ids += 1


@pytest.mark.parametrize(
    ("model_type", "settings", "change", "place"),
    [
        ("llama", {}, freeze_frequencies, FREQUENCIES),
        ("llama", {}, keep_frequencies_in_half, FREQUENCIES),
        ("qwen2", {"rope_parameters": dynamic_rope("dynamic")}, forget_original_frequencies,
         "model.rotary_emb.original_inv_freq"),
        ("llama", {"rope_parameters": dynamic_rope("yarn")}, freeze_frequencies, FREQUENCIES),
        ("gemma3_text", {}, scale_embedding, "model.embed_tokens.embed_scale"),
        ("bert", {"is_decoder": True}, shift_positions, "bert.embeddings.position_ids"),
    ],
)  # fmt: skip
def test_buffer_that_every_load_changes_alike_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, settings: dict[str, Any],
    change: Change, place: str,
) -> None:  # fmt: skip
    folder = tiny(model_type, tmp_path, **settings)
    assert inspected(folder).weights == []

    after_loading(monkeypatch, change)

    report = inspected(folder)
    assert named(report) == [(place, "not-built")]
    assert judge_load([report]).result.level.verdict is Outcome.FAIL


def test_buffer_that_initialisation_computes_wrongly_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialise: Callable[[Any, Any], None] = PreTrainedModel._init_weights

    def wrong(model: Any, module: Any) -> None:
        initialise(model, module)
        if hasattr(module, "inv_freq"):
            module.inv_freq.mul_(0.5)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", wrong)

    assert named(inspected(llama_folder)) == [(FREQUENCIES, "not-built")]


def set_each(suffix: str, attribute: str, value: object) -> Change:
    def change(model: Any) -> None:
        for path, module in model.named_modules():
            if path.endswith(suffix):
                setattr(module, attribute, value)

    return change


def exchange_attention(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers)
    first.layer_idx, second.layer_idx = 1, 0


def skip_last_layer(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def double_results(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _m, _a, output: output * 2)


def forget_softcapping(model: Any) -> None:
    model.config.final_logit_softcapping = None


def patch_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda x: x


@pytest.mark.parametrize(
    ("model_type", "change", "sentence"),
    [
        ("llama", scale_attention, "model.rotary_emb.attention_scaling is 1.5, 1.0 where"),
        ("llama", set_each("self_attn", "scaling", 0.5), "layers.0.self_attn.scaling is 0.5, 0.35"),
        ("llama", set_each("norm", "variance_epsilon", 0.1), "norm.variance_epsilon is 0.1, 1e-06"),
        ("mistral", set_each("self_attn", "is_causal", False), "self_attn.is_causal is False, True"),
        ("llama", set_each("act_fn", "__class__", nn.ReLU), "mlp.act_fn is a ReLU, not a SiLU"),
        ("llama", exchange_attention, "model.layers.0.self_attn.layer_idx is 1, 0 where"),
        ("llama", patch_forward, "model.layers.0.mlp.forward is patch_forward.<locals>.<lambda>,"),
        ("llama", double_results, "lm_head._forward_hooks is 1, 0 where"),
        ("gemma2", forget_softcapping, "(model).config.final_logit_softcapping is None, 30.0 where"),
        ("mixtral", set_each("gate", "top_k", 1), "gate.top_k is 1, 2 where"),
        ("qwen3_moe", set_each("gate", "norm_topk_prob", True), "gate.norm_topk_prob is True, False"),
        ("gemma3_text", set_each("0.self_attn", "sliding_window", None),
         "model.layers.0.self_attn.sliding_window is None, 16 where"),
    ],
)  # fmt: skip
def test_setting_that_every_load_changes_alike_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, change: Change, sentence: str
) -> None:
    folder = tiny(model_type, tmp_path)
    assert inspected(folder).settings == []

    after_loading(monkeypatch, change)

    report = inspected(folder)
    assert any(sentence in text for text in report.settings), report.settings
    level = judge_load([report]).result.level
    assert level.verdict is Outcome.FAIL


def test_layer_that_a_loader_drops_is_named(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_loading(monkeypatch, skip_last_layer)

    settings = inspected(llama_folder).settings
    assert "model.layers.1.mlp.up_proj is missing, a module of its class" in settings


def test_model_whose_class_cannot_be_built_is_not_compared(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("the device is busy")

    monkeypatch.setattr(PreTrainedModel, "_from_config", refuse)

    report = inspected(llama_folder)
    assert report.not_compared == [
        "what its class makes of config.json alone (building it raised OSError: the device is busy)"
    ]


def test_parameters_of_the_built_model_take_no_memory(llama_folder: Path) -> None:
    from assay.models import load_model
    from assay.models.inspect.second_model import build_from_config

    loaded = load_model(str(llama_folder), dtype="bfloat16")
    config = transformers.AutoConfig.from_pretrained(llama_folder)
    built = build_from_config(loaded.model, config, torch.bfloat16)

    assert all(parameter.is_meta for parameter in built.parameters())
    assert not any(buffer.is_meta for buffer in built.buffers())
    assert not nn.Linear(1, 1).weight.is_meta


def test_report_without_the_comparison_is_read() -> None:
    assert LoadReport.model_validate({"compared": 1}).settings == []
