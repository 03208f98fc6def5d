from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel

from assay.estimates.trial_call import TrialCall
from assay.models.loading.loaded_model import load_outline


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


def test_padding_changes_no_count(tmp_path: Path) -> None:
    """GPT-2 searches its token ids for padding, if there is a token for it."""
    counts = []
    for token in (None, 0):
        config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, pad_token_id=token)
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
        counts.append(TrialCall.of(load_outline(str(tmp_path)).model).num_values)

    assert counts[0] == counts[1] > 0
