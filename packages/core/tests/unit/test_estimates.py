import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from assay import estimates as speed_module
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.estimates import Speed, TrialCall, require_disk
from assay.models.load import load_outline


def test_values_of_a_decoder_are_counted_by_hand() -> None:
    outline = load_outline("micro:llama")
    config = outline.config
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
    kept = 2 * config.num_key_value_heads * heads
    # Norm, attention (queries, keys, values; its result before and after the last projection; cache),
    # sum, norm, MLP (four inner values and its result), sum.
    layer = hidden + (hidden + kept) + 2 * hidden + kept + 2 * hidden + 4 * inner + 2 * hidden
    # Embedding, last norm, what the head reads of it, cosines and sines.
    around = 3 * hidden + 2 * heads

    assert TrialCall.of(outline.model).num_values == config.num_hidden_layers * layer + around


def test_states_of_a_recurrence_are_counted_for_each_call(tmp_path: Path) -> None:
    config = MambaConfig(
        num_hidden_layers=2, hidden_size=8, vocab_size=16, state_size=4, conv_kernel=3,
        time_step_rank=2,
    )  # fmt: skip
    MambaForCausalLM(config).save_pretrained(tmp_path)
    trial = TrialCall.of(load_outline(str(tmp_path)).model)

    # Of 16 inner channels in each layer: the state, and the last inputs of the convolution.
    assert trial.num_state_values == 2 * 16 * (4 + 3)
    assert trial.num_recorded(10, 5) == 10 * trial.num_values + 5 * 224


def test_padding_changes_no_count(tmp_path: Path) -> None:
    """GPT-2 searches its token ids for padding, if there is a token for it."""
    counts = []
    for token in (None, 0):
        config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, pad_token_id=token)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        counts.append(TrialCall.of(load_outline(str(tmp_path)).model).num_values)

    assert counts[0] == counts[1] > 0


def test_token_is_multiplied_by_the_layers_and_the_head_of_a_decoder() -> None:
    outline = load_outline("micro:llama")
    config = outline.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    kept = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * queries + 2 * kept + 3 * inner)
    scores_and_values = 2 * 61 * queries  # with all 61 tokens

    multiplied = TrialCall.of(outline.model).num_multiplied

    layers = config.num_hidden_layers * (layer + scores_and_values)
    assert layers + hidden * config.vocab_size == pytest.approx(multiplied, rel=0.01)


def test_token_is_multiplied_by_the_experts_that_it_chooses() -> None:
    outline = load_outline("micro:mixtral")
    config = outline.config
    expert = 3 * config.hidden_size * config.intermediate_size
    left_out = config.num_local_experts - config.num_experts_per_tok

    multiplied = TrialCall.of(outline.model).num_multiplied

    num_weights = sum(one.numel() for one in outline.model.parameters())
    assert multiplied < num_weights - 0.8 * config.num_hidden_layers * left_out * expert


def test_seconds_are_those_of_reads_products_and_modules() -> None:
    trial = TrialCall(num_values=0, num_multiplied=1e6, num_modules=100)

    # 3 calls read 1e6 weights in 1 ms and run 100 modules in 30 ms; 50 tokens take 0.1 ms each.
    assert trial.seconds(Speed(weight=1e-9, product=1e-10), 3, 50) == pytest.approx(0.098)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float64", None), ("bfloat16", None), ("float64", "bfloat16")]
)
def test_probe_measures_a_positive_speed(dtype: str, stored: str | None) -> None:
    speed = Speed.probe(open_run(parse_run("cpu/float32")), dtype, stored)

    assert 0 < speed.weight < 1e-6
    assert 0 < speed.product < 1e-7


def test_time_of_a_product_is_that_of_one_weight_and_one_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(speed_module, "time", clock)
    monkeypatch.setattr(speed_module, "_ROWS", 16)
    monkeypatch.setattr(speed_module, "_COLUMNS", 32)

    speed = Speed.probe(open_run(parse_run("cpu/float32")), "float32")

    # Each product takes a second: 512 weights, by 4 or by 64 tokens.
    assert speed.weight == 1 / 512
    assert speed.product == 1 / 512 / 64


def test_golden_beyond_the_allowed_disk_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as raised:
        require_disk("the golden", 3 * 10**9, tmp_path / "new" / "golden", 10**9, "less")

    assert "needs about 3.0 GB of disk, but --disk allows 1.0 GB. Use less" in str(raised.value)
    require_disk("the golden", 10**6, tmp_path, 10**9, "less")


def test_golden_beyond_the_free_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=re.escape(f"{tmp_path} has ")):
        require_disk("the golden", 10**18, tmp_path, None, "less")
