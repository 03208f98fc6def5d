"""Encoder-decoders: the encoder runs once, the decoder prefills and steps with both caches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    LongformerConfig,
    LongformerModel,
    T5Config,
    T5ForConditionalGeneration,
)

from assay.generate.generation_loop import limits_of_generation
from assay.models import load_model
from packages.core.tests.subsystem.commands import Finished
from packages.core.tests.subsystem.generate.saved_models import save_random

RunAssay = Callable[..., Finished]

RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")
SHORT = ("--max-new-tokens", "4", "--prompt-length", "8:24")
TOKENS: dict[str, Any] = {
    "vocab_size": 300,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
T5 = T5Config(
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    **TOKENS,
)
BART = BartConfig(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=64,
    bos_token_id=2,
    **TOKENS,
)

PLANTS = """
import torch
from torch import nn


def change_arguments(part, change):
    forward = part.forward

    def changed(*args, **kwargs):
        change(kwargs)
        return forward(*args, **kwargs)

    part.forward = changed


def lost_encoder_mask(model):
    change_arguments(model.get_encoder(), lambda kwargs: kwargs.update(attention_mask=None))


def lost_cross_mask(model):
    change_arguments(model.get_decoder(), lambda kwargs: kwargs.update(encoder_attention_mask=None))


def scaled_values(model):
    attention = model.model.decoder.layers[1].encoder_attn
    attention.v_proj.register_forward_hook(lambda module, args, output: 1.05 * output)


def other_row(model):
    def roll(kwargs):
        cache = kwargs["past_key_values"]
        if cache.get_seq_length() == 2:
            for layer in cache.cross_attention_cache.layers:
                layer.keys = layer.keys.roll(1, 0)

    change_arguments(model.get_decoder(), roll)


def bias_lost_in_decode(model):
    attention = model.decoder.block[0].layer[0].SelfAttention
    compute_bias = attention.compute_bias

    def changed(*args, **kwargs):
        bias = compute_bias(*args, **kwargs)
        return bias * 0 if kwargs.get("past_seen_tokens") else bias

    attention.compute_bias = changed


def head_as_embedding(model):
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.clone())


def scaled_cross_query(model):
    model.model.decoder.layers[1].encoder_attn.q_proj.weight.data *= 1.02


def wrong_start(model):
    generate = model.generate

    def changed(*args, **kwargs):
        kwargs["decoder_input_ids"] = kwargs["decoder_input_ids"] + 1
        return generate(*args, **kwargs)

    model.generate = changed
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "t5": save_random(folder / "t5", T5ForConditionalGeneration, T5, PLANTS),
        "bart": save_random(folder / "bart", BartForConditionalGeneration, BART, PLANTS),
    }


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.long)])
def test_encoder_decoder_passes_at_every_level(
    name: str, models: dict[str, Path], assay: RunAssay
) -> None:
    run = assay("check", "generate", models[name], *RUNS, *SHORT)

    assert run.code == 0, run.stdout
    levels = run.verdict["levels"]
    for level in ("load", "inputs", "tokens", "logits", "modules", "sampler"):
        assert levels[level]["verdict"] == "PASS", level
    assert run.verdict["coverage"]["not_run_parts"] == {}


@pytest.mark.long
def test_golden_of_an_encoder_decoder_judges_candidates(
    models: dict[str, Path], assay: RunAssay, tmp_path: Path
) -> None:
    model, golden = models["t5"], tmp_path / "golden"
    capture = ("capture", model, "--run", "cpu/float32", "--noise-for", "bfloat16", *SHORT)
    assert assay(*capture, output=golden).code == 0
    check = ("check", "generate", model, "--golden", golden, "--candidate", "cpu/bfloat16")

    clean = assay(*check)
    faulty = assay(*check, "--candidate-setup", f"{model / 'plants.py'}:lost_encoder_mask")

    assert (clean.code, faulty.code) == (0, 1), clean.stdout
    assert faulty.verdict["location"]["module"] == "encoder"


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_prompts_that_run_alone_need_no_mask_of_padding(
    name: str, models: dict[str, Path], assay: RunAssay
) -> None:
    run = assay(
        "check", "generate", models[name], *RUNS, *SHORT, "--candidate-option", "batch-size=1"
    )

    assert run.code == 0, run.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "plant", "module", "step"),
    [
        ("t5", "lost_encoder_mask", "encoder", 0),
        ("bart", "lost_encoder_mask", "model.encoder", 0),
        ("t5", "lost_cross_mask", "decoder", 1),
        ("bart", "lost_cross_mask", "model.decoder", 1),
        ("t5", "other_row", "decoder", 3),
        ("bart", "other_row", "model.decoder", 3),
        ("t5", "bias_lost_in_decode", "decoder.block.0.layer.0.SelfAttention", 2),
        ("bart", "head_as_embedding", "lm_head", 1),
        ("bart", "scaled_cross_query", "model.decoder.layers.1.encoder_attn.q_proj", 1),
    ],
)
def test_fault_of_an_encoder_decoder_is_found_at_its_place(
    name: str, plant: str, module: str, step: int, models: dict[str, Path], assay: RunAssay
) -> None:
    setup = f"{models[name] / 'plants.py'}:{plant}"

    run = assay("check", "generate", models[name], *RUNS, *SHORT, "--candidate-setup", setup)

    assert run.code == 1, run.stdout
    place = run.verdict["location"]
    assert (place["module"], place["step"]) == (module, step)


@pytest.mark.long
def test_other_first_id_of_the_decoder_fails(models: dict[str, Path], assay: RunAssay) -> None:
    setup = f"{models['bart'] / 'plants.py'}:wrong_start"

    run = assay("check", "generate", models["bart"], *RUNS, *SHORT, "--candidate-setup", setup)

    assert run.code == 1, run.stdout
    assert run.verdict["diagnosis"] == "inputs-differ"


@pytest.mark.parametrize(
    ("plant", "module"),
    [(None, None), ("scaled_values", "model.decoder.layers.1.encoder_attn.v_proj")],
)
def test_decoder_alone_attends_to_states_of_an_encoder(
    plant: str | None, module: str | None, assay: RunAssay, tmp_path: Path
) -> None:
    model = save_random(tmp_path / "model", BartForCausalLM, BART, PLANTS)
    setup = () if plant is None else ("--candidate-setup", f"{model / 'plants.py'}:{plant}")

    run = assay("check", "generate", model, *RUNS, *SHORT, *setup)

    if plant is None:
        assert run.code == 0, run.stdout
        assert run.verdict["coverage"]["not_run_parts"] == {}
    else:
        assert run.code == 1, run.stdout
        assert run.verdict["location"]["module"] == module


def test_encoder_gets_the_mask_without_which_a_part_never_runs(tmp_path: Path) -> None:
    config = LongformerConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        attention_window=8,
        vocab_size=300,
    )
    model = save_random(tmp_path / "model", LongformerModel, config, PLANTS)

    limits = limits_of_generation(load_model(str(model), dtype="float32"))

    assert [one.name for one in limits.optional] == ["global_attention_mask"]
