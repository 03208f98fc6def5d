"""The planted faults, each with its models and the right verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.stages import Stage
from assay.verdicts import Diagnosis

PLANTS = Path(__file__).parent / "plants"

ALL = ("llama", "gemma2", "mixtral")
LLAMA, GEMMA2, MIXTRAL, MISTRAL = (("llama",), ("gemma2",), ("mixtral",), ("mistral",))
GATED = ("llama", "gemma2")  # with one gated MLP in each layer
WINDOWED = ("mistral", "gemma2")
UNCAPPED = ("llama", "mixtral")
CACHED = ("llama", "mistral")
BOTH = ("float32", "bfloat16")


@dataclass(frozen=True)
class Fault:
    """A plant in a model.

    plant: FILE:FUNCTION below `plants`.
    stage: where the error is made; `operation` in it, where one can be named.
    """

    plant: str
    recipe: str
    dtype: str
    stage: Stage
    diagnosis: Diagnosis
    operation: str | None

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        return f"{self.plant} {self.recipe} {self.dtype}"

    @property
    def setup(self) -> str:
        """As `--candidate-setup` takes it."""
        file, _, function = self.plant.partition(":")
        return f"{PLANTS / file}.py:{function}"


def corpus() -> Iterator[Fault]:
    """Every fault in every model and dtype."""
    for part in (
        _rotary,
        _masks,
        _attention,
        _norms,
        _linears,
        _embeddings,
        _caches,
        _experts,
        _heads,
        _layers,
        _generation,
    ):
        yield from part()


def choose_faults(part: str) -> list[Fault]:
    """The faults whose name contains `part`. Raises: UsageError for none: nothing would fail."""
    chosen = [fault for fault in corpus() if part in fault.name]
    if not chosen:
        names = ", ".join(sorted({fault.plant for fault in corpus()}))
        raise pytest.UsageError(f"--fault {part}: no fault has such a name; there are: {names}")
    return chosen


def _rotary() -> Iterator[Fault]:
    rotary, attention = Stage("model.rotary_emb"), Stage("model.layers.1.self_attn")
    yield from _plant("rotary:phase_in_bfloat16", rotary, operation="mul")
    yield from _plant("rotary:other_theta", rotary, MIXTRAL, diagnosis="weight-mismatch")
    yield from _plant("rotary:scaling_factor_applied", rotary, LLAMA, diagnosis="weight-mismatch")
    yield from _plant("rotary:attention_factor", rotary, UNCAPPED, operation="mul")
    yield from _plant("rotary:one_frequency_wrong", rotary, diagnosis="weight-mismatch")
    yield from _plant("rotary:stale_in_decode", rotary, LLAMA)
    yield from _plant("rotary:positions_end_at_1000", rotary, GEMMA2)
    yield from _plant("rotary:interleaved", Stage("model.layers.0.self_attn"), LLAMA)
    yield from _plant("rotary:keys_not_rotated", attention, GEMMA2)
    yield from _plant("rotary:sine_of_other_sign", attention, MIXTRAL)
    yield from _plant("rotary:last_dims_not_rotated", attention, LLAMA)


def _masks() -> Iterator[Fault]:
    model, layer = Stage("model"), Stage("model.layers.2")
    yield from _plant("masks:padding_seen", model)
    yield from _plant("masks:window_one_longer", model, WINDOWED)
    yield from _plant("masks:window_one_shorter", model, MISTRAL)
    yield from _plant("masks:window_lost", model, GEMMA2)
    yield from _plant("masks:window_in_all_layers", model, GEMMA2)
    yield from _plant("masks:future_token_seen", model, LLAMA)
    yield from _plant("masks:newest_token_unseen", model, WINDOWED)
    yield from _plant("masks:chunks_forget_one_token", model, LLAMA)
    yield from _plant("masks:lost_in_one_layer", layer, GATED)


def _attention() -> Iterator[Fault]:
    attention = Stage("model.layers.1.self_attn")
    yield from _plant("attention:scale_2_percent", attention, GATED)
    yield from _plant("attention:scale_half_percent", attention)
    yield from _plant("attention:softcap_lost", attention, GEMMA2)
    yield from _plant("attention:softcap_halved", attention, GEMMA2)
    yield from _plant("attention:heads_in_wrong_groups", attention, MIXTRAL)
    yield from _plant("attention:heads_exchanged", attention, LLAMA)
    yield from _plant("attention:one_head_scaled", attention)
    yield from _plant(
        "attention:softmax_in_bfloat16", attention, GATED, ("float32",), operation="softmax"
    )
    yield from _plant("attention:softmax_with_extra_one", attention, LLAMA)
    yield from _plant("attention:padding_not_a_number", attention, LLAMA, diagnosis="non-finite")
    yield from _plant("attention:values_one_behind", attention, MIXTRAL)
    yield from _plant("attention:dropout_in_eval", attention, LLAMA, diagnosis="nondeterminism")


def _norms() -> Iterator[Fault]:
    norm = Stage("model.layers.1.input_layernorm")
    yield from _plant("norms:root_in_bfloat16", norm, operation="rsqrt")
    yield from _plant("norms:epsilon_ten_times", norm)
    yield from _plant("norms:epsilon_outside_of_the_root", norm, LLAMA)
    yield from _plant("norms:mean_subtracted", norm, GEMMA2)
    yield from _plant("norms:last_channel_not_counted", norm, MIXTRAL)
    yield from _plant("norms:unit_offset_lost", norm, GEMMA2)
    yield from _plant("norms:weights_lost", norm, LLAMA, diagnosis="weight-mismatch")
    yield from _plant("norms:final_norm_skipped", Stage("model.norm"), LLAMA)


def _linears() -> Iterator[Fault]:
    yield from _weights("linears:down_weights_2_percent", "mlp.down_proj", LLAMA)
    yield from _weights("linears:output_weights_2_percent", "self_attn.o_proj", MIXTRAL)
    yield from _weights("linears:output_weights_half_percent", "self_attn.o_proj", ALL)
    yield from _linear("linears:down_outputs_1_per_mille", "mlp.down_proj", GATED, "mul")
    yield from _linear("linears:query_outputs_1_per_mille", "self_attn.q_proj", MIXTRAL, "mul")
    yield from _linear("linears:output_outputs_half_per_mille", "self_attn.o_proj", ALL, "mul")
    yield from _linear("linears:value_outputs_2_per_mille", "self_attn.v_proj", GEMMA2, "mul")
    yield from _linear("linears:one_channel_scaled", "self_attn.k_proj", ALL, "mul")
    yield from _linear("linears:last_term_dropped", "self_attn.q_proj", LLAMA, "linear")
    yield from _linear("linears:half_of_the_sum_lost", "self_attn.o_proj", LLAMA, "linear")
    yield from _linear("linears:shards_exchanged", "self_attn.v_proj", MIXTRAL, "roll")
    yield from _linear("linears:bias_added", "self_attn.k_proj", ALL, "add")
    yield from _weights("linears:zero_point_off_by_one", "self_attn.v_proj", GEMMA2)
    yield from _weights("linears:weights_in_8_bits", "self_attn.q_proj", ALL)
    yield from _weights("linears:transposed", "self_attn.q_proj", LLAMA)
    yield from _weights("linears:neighbours_weights", "self_attn.v_proj", MIXTRAL)
    yield from _weights("linears:one_weight_flipped", "self_attn.o_proj", GEMMA2)


def _embeddings() -> Iterator[Fault]:
    table = Stage("model.embed_tokens")
    yield from _plant("embeddings:scale_of_other_precision", table, GEMMA2, operation="mul")
    yield from _plant("embeddings:masked_rows_added", table, GATED)
    yield from _plant("embeddings:one_token_scaled", table, GATED)
    yield from _plant("embeddings:last_ids_clamped", table, LLAMA)
    yield from _plant("embeddings:rows_exchanged", table, GATED, diagnosis="weight-mismatch")


def _caches() -> Iterator[Fault]:
    attention = Stage("model.layers.1.self_attn")
    yield from _plant("caches:values_1_percent", attention, GATED)
    yield from _plant("caches:keys_in_float8", attention, LLAMA)
    yield from _plant("caches:heads_exchanged", attention, MIXTRAL)
    yield from _plant("caches:write_dropped", attention, CACHED)
    yield from _plant("caches:old_token_overwritten", attention, WINDOWED)
    yield from _plant("caches:rows_exchanged", attention, LLAMA)


def _experts() -> Iterator[Fault]:
    block, experts, gate = (Stage(f"model.layers.1.mlp{end}") for end in ("", ".experts", ".gate"))
    yield from _plant(
        "experts:one_experts_weights_2_percent", experts, MIXTRAL, diagnosis="weight-mismatch"
    )
    yield from _plant("experts:one_expert_half_percent", experts, MIXTRAL)
    yield from _plant(
        "experts:gate_and_up_exchanged", experts, MIXTRAL, diagnosis="weight-mismatch"
    )
    yield from _plant("experts:token_dropped", experts, MIXTRAL)
    yield from _plant("experts:weights_of_ranks_exchanged", block, MIXTRAL)
    yield from _plant("experts:third_best_for_second", gate, MIXTRAL)
    yield from _plant("experts:softmax_over_tokens", gate, MIXTRAL)
    yield from _plant("experts:not_renormalised", gate, MIXTRAL)
    yield from _plant("experts:routed_in_bfloat16", gate, MIXTRAL, operation="softmax")


def _heads() -> Iterator[Fault]:
    logits, head = Stage(""), Stage("lm_head")
    yield from _plant("heads:fresh_head", head, LLAMA, diagnosis="weight-mismatch")
    yield from _plant("heads:fresh_head", head, GEMMA2, diagnosis="untied-parameters")
    yield from _plant("heads:tie_lost", head, GEMMA2, diagnosis="untied-parameters")
    yield from _plant("heads:final_softcap_lost", logits, GEMMA2)
    yield from _plant("heads:logits_1_percent", logits, GATED)
    yield from _plant("heads:shards_exchanged", head, MIXTRAL)
    yield from _plant("heads:one_logit_not_a_number", logits, LLAMA, diagnosis="non-finite")


def _layers() -> Iterator[Fault]:
    mlp, activation = Stage("model.layers.2.mlp"), Stage("model.layers.2.mlp.act_fn")
    layer = Stage("model.layers.2")
    yield from _plant("layers:other_gelu", activation, GEMMA2)
    yield from _plant("layers:sigmoid_scaled", activation, LLAMA)
    yield from _plant("layers:activation_in_bfloat16", activation, LLAMA)
    yield from _plant("layers:activation_saturates", activation, GEMMA2)
    yield from _plant("layers:gate_and_up_exchanged", mlp, LLAMA)
    yield from _plant("layers:product_not_a_number", mlp, GEMMA2, diagnosis="non-finite")
    yield from _plant("layers:residual_2_percent", layer, GATED)
    yield from _plant("layers:residual_in_bfloat16", layer, UNCAPPED, dtypes=("float32",))
    yield from _plant("layers:layer_skipped", layer, LLAMA)


def _generation() -> Iterator[Fault]:
    loop = Stage("", "inputs")
    for name, recipes in {
        "positions_count_padding": GATED,
        "positions_one_ahead": LLAMA,
        "chunks_begin_at_zero": LLAMA,
        "padding_mask_lost": GEMMA2,
        "newest_token_masked": LLAMA,
        "token_before_repeated": MIXTRAL,
    }.items():
        yield from _plant(f"generation:{name}", loop, recipes, diagnosis="inputs-differ")


def _plant(
    plant: str,
    stage: Stage,
    recipes: tuple[str, ...] = ALL,
    dtypes: tuple[str, ...] = BOTH,
    diagnosis: Diagnosis = "module-error",
    operation: str | None = None,
) -> Iterator[Fault]:
    for recipe in recipes:
        for dtype in dtypes:
            yield Fault(plant, recipe, dtype, stage, diagnosis, operation)


def _linear(
    plant: str, projection: str, recipes: tuple[str, ...], operation: str
) -> Iterator[Fault]:
    yield from _plant(plant, Stage(f"model.layers.1.{projection}"), recipes, operation=operation)


def _weights(plant: str, projection: str, recipes: tuple[str, ...]) -> Iterator[Fault]:
    stage = Stage(f"model.layers.1.{projection}")
    yield from _plant(plant, stage, recipes, diagnosis="weight-mismatch", operation="linear")
