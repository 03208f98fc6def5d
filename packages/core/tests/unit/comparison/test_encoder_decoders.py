"""Captures of models that compute two sequences: an encoder and its decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.recording.capture import capture
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict

PROMPTS = torch.arange(40, 80).reshape(2, 20)
RIGHT_PADDED = torch.ones_like(PROMPTS)
RIGHT_PADDED[1, 9:] = 0
Run = Callable[[Any], object]


def make_bart() -> Any:
    torch.manual_seed(13)
    config = BartConfig(
        vocab_size=90, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.2,
        max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval()


def make_llama() -> Any:
    torch.manual_seed(13)
    config = LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def scale(module: nn.Module, row: int, length: int) -> None:
    """Make a module wrong in one row of its calls over `length` tokens."""

    def change(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        changed = output.clone()
        changed[row] *= 1.5 if output.shape[1] == length else 1.0
        return changed

    module.register_forward_hook(change)


def judge(folder: Path, make: Callable[[], Any], plant: Run, run: Run) -> Verdict:
    for name in ("expected", "actual"):
        model = make()
        if name == "actual":
            plant(model)
        with torch.no_grad(), capture(model, folder / name):
            run(model)
    sides = open_dump(str(folder / "expected")), open_dump(str(folder / "actual"))
    return compare_dumps(CompareOptions("e", "a"), *sides, SilentProgress()).verdict


def generate(model: Any) -> None:
    model.generate(
        input_ids=PROMPTS, attention_mask=RIGHT_PADDED, max_new_tokens=3, min_new_tokens=3,
        do_sample=False,
    )  # fmt: skip


def test_decode_steps_of_a_prompt_with_padding_on_the_right_are_compared(tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        scale(model.model.decoder.layers[0].fc2, row=1, length=1)

    verdict = judge(tmp_path, make_bart, plant, generate)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "model.decoder.layers.0.fc2"
    assert verdict.location.step == 1  # after the call of the encoder
    assert verdict.first_bad_token is not None
    assert verdict.first_bad_token.phase == "decode"


def test_decoder_tokens_are_not_padding_where_the_texts_of_both_have_one_length(
    tmp_path: Path,
) -> None:
    def train(model: Any) -> None:
        model(input_ids=PROMPTS, attention_mask=RIGHT_PADDED, labels=PROMPTS + 1)

    def plant(model: Any) -> None:
        def change(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[1, 15:] *= 1.5
            return changed

        model.model.decoder.layers[0].fc2.register_forward_hook(change)

    verdict = judge(tmp_path, make_bart, plant, train)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == "model.decoder.layers.0.fc2"


def test_padding_of_an_encoder_is_left_out_and_counted(tmp_path: Path) -> None:
    def plant(model: Any) -> None:
        def change(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[1, 9:] *= 1.5
            return changed

        model.model.encoder.layers[0].final_layer_norm.register_forward_hook(change)

    def encode(model: Any) -> None:
        model.get_encoder()(PROMPTS, attention_mask=RIGHT_PADDED)

    verdict = judge(tmp_path, make_bart, plant, encode)

    assert verdict.verdict is Outcome.PASS
    (note,) = [note for note in verdict.notes if note.startswith("padding is not compared")]
    # 11 tokens of prompt 1, in each tensor of the encoder.
    assert int(note.split(": ")[1].split()[0].replace(",", "")) % 11 == 0


def test_mask_of_a_whole_static_cache_pads_no_token(tmp_path: Path) -> None:
    def run(model: Any) -> None:
        cache = StaticCache(config=model.config, max_cache_len=32)
        for start, end in ((0, 20), (20, 21)):
            mask = torch.zeros(2, 32, dtype=torch.long)
            mask[:, :end] = 1
            ids = PROMPTS if start == 0 else PROMPTS[:, :1]
            model(input_ids=ids, attention_mask=mask, past_key_values=cache)

    def plant(model: Any) -> None:
        scale(model.model.layers[0].mlp.down_proj, row=1, length=1)

    verdict = judge(tmp_path, make_llama, plant, run)

    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["completeness"].verdict is Outcome.PASS
    assert verdict.location is not None
    assert verdict.location.module == "model.layers.0.mlp.down_proj"


def test_padding_of_a_chunked_prefill_is_that_of_its_columns(tmp_path: Path) -> None:
    mask = torch.ones_like(PROMPTS)
    mask[1, :12] = 0

    def run(model: Any) -> None:
        cache = DynamicCache(config=model.config)
        for start, end in ((0, 8), (8, 20)):
            model(PROMPTS[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)

    def plant(model: Any) -> None:
        def change(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            changed = output.clone()
            changed[1] *= 1.5 if output.shape[1] == 8 else 1.0  # all padding
            return changed

        model.model.norm.register_forward_hook(change)

    assert judge(tmp_path, make_llama, plant, run).verdict is Outcome.PASS


def make_t5() -> Any:
    torch.manual_seed(13)
    config = T5Config(
        vocab_size=90, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        dropout_rate=0.0,
    )  # fmt: skip
    config.decoder_start_token_id = 2
    model = T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def judge_padding(
    folder: Path, make: Callable[[], Any], ids: Tensor, mask: Tensor, plant: Run
) -> Verdict:
    """Compare a run on PROMPTS with one on other ids and mask, which may have a fault."""
    for name, given in (("expected", (PROMPTS, RIGHT_PADDED)), ("actual", (ids, mask))):
        model = make()
        if name == "actual":
            plant(model)
        with torch.no_grad(), capture(model, folder / name):
            model.generate(
                input_ids=given[0], attention_mask=given[1], max_new_tokens=3, min_new_tokens=3,
                do_sample=False,
            )  # fmt: skip
    sides = open_dump(str(folder / "expected")), open_dump(str(folder / "actual"))
    return compare_dumps(CompareOptions("e", "a"), *sides, SilentProgress()).verdict


def with_other_padding() -> Tensor:
    ids = PROMPTS.clone()
    ids[1, 9:] = 7
    return ids


@pytest.mark.parametrize("make", [make_bart, make_t5])
def test_a_decoder_ignores_the_padding_of_its_encoder(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    verdict = judge_padding(tmp_path, make, with_other_padding(), RIGHT_PADDED, lambda _: None)
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes[0].startswith("padding is not compared: ")


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_an_error_of_attention_to_the_encoder_is_found_with_padding(
    tmp_path: Path, name: str
) -> None:
    def plant(model: Any) -> None:
        weight = model.model.decoder.layers[0].encoder_attn.get_submodule(name).weight
        weight.data *= 1.1

    verdict = judge_padding(tmp_path, make_bart, with_other_padding(), RIGHT_PADDED, plant)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == f"model.decoder.layers.0.encoder_attn.{name}"


def test_padding_of_an_encoder_on_the_other_side_is_no_difference(tmp_path: Path) -> None:
    """T5 has relative positions, so the same tokens have the same results there."""
    ids, mask = torch.full_like(PROMPTS, 5), torch.ones_like(PROMPTS)
    ids[0], ids[1, 11:], mask[1, :11] = PROMPTS[0], PROMPTS[1, :9], 0
    verdict = judge_padding(tmp_path, make_t5, ids, mask, lambda _: None)
    assert verdict.verdict is Outcome.NOT_COMPARED  # the bias of all positions has no tokens
    assert "modules" in verdict.levels
    assert verdict.levels["modules"].verdict is Outcome.PASS
