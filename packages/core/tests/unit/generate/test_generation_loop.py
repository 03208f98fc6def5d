"""Running a batch through the model's own generation loop."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from assay.generate.generation_loop import (
    Generated,
    OutputError,
    generate,
    generate_forced,
    generation_options,
    limits_of_generation,
    name_outputs,
    timeline_of,
)
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.inputs import Batch
from assay.models import LoadedModel
from assay.models.transformers_calls import quiet_transformers


@torch.no_grad()
def logits_without_cache(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Logits of every position in one plain forward call."""
    logits: Tensor = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0]


@pytest.fixture(scope="module")
def free(llama: LoadedModel) -> Generated:
    return generate(llama, Batch(7, ((65, 66), (67, 68, 69, 70)), (0, 1), 259, 3))


def test_greedy_tokens_are_the_largest_logits_of_plain_forward_calls(
    llama: LoadedModel, free: Generated, batch: Batch
) -> None:
    assert free.tokens.shape == (2, 3)
    for row, prompt in enumerate(batch.rows):
        ids = [*prompt, *free.tokens[row].tolist()]
        logits = logits_without_cache(llama, ids)
        for step in range(3):
            expected = logits[len(prompt) - 1 + step]
            assert torch.allclose(free.logits[row, step], expected, atol=1e-4)


def test_forced_tokens_give_the_logits_before_any_processor(
    llama: LoadedModel, batch: Batch
) -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])

    forced = generate_forced(llama, batch, tokens)

    assert torch.equal(forced.tokens, tokens)
    assert bool(forced.logits.isfinite().all())
    expected = logits_without_cache(llama, [65, 66, 1, 2])[1:]
    assert torch.allclose(forced.logits[0], expected, atol=1e-4)


def test_forcing_the_model_s_own_tokens_changes_no_bit(
    llama: LoadedModel, free: Generated, batch: Batch
) -> None:
    assert torch.equal(generate_forced(llama, batch, free.tokens).logits, free.logits)


TOKENS = torch.tensor([[259, 259, 65, 66, 1, 2, 3], [67, 68, 69, 70, 4, 5, 6]])
STEPS = tuple(torch.zeros(2, 260) for _ in range(3))


@pytest.mark.parametrize(
    ("sequences", "logits", "message"),
    [
        (TOKENS[:, :-1], STEPS[:-1], "returned 6 ids in each row, not 4 of the prompt and 3 new"),
        (torch.cat([TOKENS, TOKENS[:, :1]], 1), STEPS, "returned 8 ids in each row, not 4 of"),
        (TOKENS[:, 4:], STEPS, "returned 3 ids in each row, not 4 of"),
        (TOKENS[:1], STEPS, r"ids of shape \[1, 7\], not 2 rows of 7"),
        (TOKENS[0], STEPS, r"ids of shape \[7\], not 2 rows of 7"),
        (TOKENS * float("nan"), STEPS, "ids of dtype torch.float32"),
        (-TOKENS, STEPS, "ids from -6 to -1, not 0 to 259"),
        (TOKENS + 258, STEPS, "ids from 259 to 264, not 0 to 259"),
        (TOKENS, STEPS[:2], "logits of 2 steps, not 3"),
        (TOKENS, (*STEPS[:2], None), "logits of type NoneType"),
        (TOKENS, (*STEPS[:2], STEPS[0].long()), "logits of type torch.int64"),
        (TOKENS, (*STEPS[:2], STEPS[0][:, :9]), r"logits of shape \[2, 9\]"),
        (TOKENS, tuple(one[:1] for one in STEPS), r"logits of shape \[1, 260\], not \[2, vocab"),
        (TOKENS.tolist(), STEPS, "returned SimpleNamespace without sequences and logits"),
        (TOKENS, None, "returned SimpleNamespace without sequences and logits"),
    ],
)
def test_output_of_another_shape_is_one_error_in_words(
    llama: LoadedModel,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
    sequences: Any,
    logits: Any,
    message: str,
) -> None:
    result = SimpleNamespace(sequences=sequences, logits=logits)
    monkeypatch.setattr(llama.model, "generate", lambda *_, **__: result, raising=False)

    with pytest.raises(OutputError, match=message) as found:
        generate(llama, batch)
    assert not found.value.raised


def test_what_the_model_raises_is_one_error_in_words(
    llama: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(llama.model, "generate", fail, raising=False)

    with pytest.raises(OutputError, match="the model raised RuntimeError: no such kernel") as found:
        generate(llama, batch)
    assert found.value.raised


def test_end_of_text_is_never_chosen_freely(llama: LoadedModel, batch: Batch) -> None:
    class Ending(NullHandler):
        def leave(self, active: ActiveCall, output: Any) -> Any:
            if not active.call.site.module:
                output.logits[..., llama.eos_token_ids[0]] = 100.0
            return output

    with ModuleTracer(Ending()).attached(llama.model):
        generated = generate(llama, batch)

    assert generated.tokens.shape == (2, 3)
    assert llama.eos_token_ids[0] not in generated.tokens.unique().tolist()


def test_prefill_in_chunks_gives_the_same_tokens(
    llama: LoadedModel, free: Generated, batch: Batch
) -> None:
    chunked = generate(llama, replace(batch, prefill_chunk=2))

    assert torch.equal(chunked.tokens, free.tokens)
    assert torch.allclose(chunked.logits, free.logits, atol=1e-4)


def test_padding_changes_nothing_but_rounding(
    llama: LoadedModel, free: Generated, batch: Batch
) -> None:
    alone = generate(llama, replace(batch, rows=batch.rows[:1], prompts=(0,)))

    assert torch.allclose(alone.logits[0], free.logits[0], atol=1e-4)


def test_encoder_gives_logits_of_every_position_and_no_tokens(bert: LoadedModel) -> None:
    batch = Batch(0, ((65, 66), (67, 68, 69)), (0, 1), 259, 0)

    generated = generate(bert, batch)

    assert generated.tokens.shape == (2, 0)
    assert generated.logits.shape == (2, 3, bert.vocab_size)


def test_sampling_options_reach_the_generation_loop(llama: LoadedModel, batch: Batch) -> None:
    options = generation_options(llama, batch, {"do_sample": True, "temperature": 0.5, "top_k": 3})

    assert (options.do_sample, options.temperature, options.top_k) == (True, 0.5, 3)
    assert (options.max_new_tokens, options.min_new_tokens) == (3, 3)
    assert generation_options(llama, batch, {}).do_sample is False


def test_timeline_has_the_positions_of_prompts_and_generated_tokens(batch: Batch) -> None:
    assert timeline_of(batch).positions.tolist() == [
        [-1, -1, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_model_with_a_cache_reads_its_prompt_in_chunks(llama: LoadedModel) -> None:
    assert limits_of_generation(llama).whole_prefill == ""


MAMBA = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
RWKV = {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
RECURRENT_GEMMA = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "lru_width": 32,
    "intermediate_size": 64, "attention_window_size": 16,
}  # fmt: skip


def recurrent_model(kind: str, settings: dict[str, Any]) -> LoadedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=64, **settings)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config).eval()
    for (
        parameter
    ) in model.parameters():  # the initial biases, and the embedding of padding, are zero
        nn.init.normal_(parameter, std=0.3)
    loaded = SimpleNamespace(
        model=model, config=config, vocab_size=64, max_positions=None, pad_token_id=0,
        eos_token_ids=(), can_generate=True, decoder_start=(), media_input="", media_token_id=None,
    )  # fmt: skip
    return cast("LoadedModel", loaded)


def test_model_whose_cache_has_another_name_reads_its_prompt_in_one_call() -> None:
    limits = limits_of_generation(recurrent_model("mamba", MAMBA))

    assert "without a cache" in limits.whole_prefill


# transformers 5.23.0: Mamba masks padding in its convolution and state, RWKV and RecurrentGemma do not.
@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [("mamba", MAMBA, False), ("rwkv", RWKV, True), ("recurrent_gemma", RECURRENT_GEMMA, True)],
)
def test_padding_is_kept_from_a_recurrent_model_that_takes_it_for_tokens(
    kind: str, settings: dict[str, Any], *, expected: bool
) -> None:
    loaded: Any = recurrent_model(kind, settings)
    assert limits_of_generation(loaded).reads_padding == expected
    loaded.model, loaded.can_generate = loaded.model.base_model, False
    loaded.chooses_answers = False
    assert limits_of_generation(loaded).reads_padding == expected


HIDDEN, POOLED = torch.zeros(2, 5, 8), torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({"logits": torch.zeros(2, 5, 260)}, ["logits"]),
        ({"loss": torch.zeros(()), "logits": torch.zeros(2, 3)}, ["output-logits"]),
        (
            {"last_hidden_state": HIDDEN, "pooler_output": POOLED, "hidden_states": (HIDDEN,)},
            ["output-last_hidden_state", "output-pooler_output"],
        ),
        ((torch.zeros(2, 5, 260), POOLED), ["logits", "output-1"]),
        (HIDDEN, ["output-0"]),
        ({"feature_maps": (HIDDEN, POOLED)}, ["output-feature_maps.0", "output-feature_maps.1"]),
    ],
)
def test_outputs_are_named_by_the_model(output: object, names: list[str]) -> None:
    assert [*name_outputs(output, 260)] == names


def test_output_without_a_floating_point_tensor_is_refused() -> None:
    with pytest.raises(OutputError, match=r"no floating-point tensor: ids of type torch\.int64"):
        name_outputs({"ids": torch.zeros(2, 5, dtype=torch.long)}, 260)


@pytest.mark.parametrize(
    ("message", "generates"), [("You must specify a `tgt_lang`.", False), ("No `inputs`.", True)]
)
def test_model_whose_generation_needs_an_option_is_called_once(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, message: str, generates: bool
) -> None:
    def generate_speech(tgt_lang: object = None, **_: object) -> None:
        if tgt_lang is None:
            raise ValueError(message)

    monkeypatch.setattr(llama.model, "generate", generate_speech)

    limits = limits_of_generation(llama)

    assert limits.can_generate == generates
    assert bool(limits.only_forward) != generates
