"""Published bugs that show when a model generates."""

from collections.abc import Iterator

from assay.sites import Phase
from assay.verdicts import Diagnosis
from packages.core.tests.faults.published.planted import BOTH, FLOAT32, Planted

LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
LLAMA, MISTRAL, MIXTRAL, GEMMA2 = (
    f"micro:{name}" for name in ("llama", "mistral", "mixtral", "gemma2")
)


def generation() -> Iterator[Planted]:
    """Every bug of generation."""
    for part in (_attention, _masks, _rotary, _caches, _experts, _products, _weights, _loop):
        yield from part()


def _attention() -> Iterator[Planted]:
    for bug, plant, model in (
        ("flashinfer-window-left-dropped", "window_lost_in_prefill", MISTRAL),
        ("mps-bmm-2to32", "last_row_overflows", LLAMA),
        ("softcap-zero-hardcoded", "softcap_dropped", GEMMA2),
        ("sdpa-topleft-cache", "causal_from_the_top_left", LLAMA),
        ("rocm-sdpa-custom-mask", "padded_rows_shifted", LLAMA),
        ("cudagraph-stale-kv-shape", "length_of_captured_graph", LLAMA),
    ):
        yield _module(bug, f"attention:{plant}", "attention:correct", model, ATTENTION)
    # The same text gives other numbers after another request.
    yield _module(
        "rocm-attn-padding-leak",
        "attention:stale_slots_leak",
        "attention:correct",
        LLAMA,
        ATTENTION,
        "nondeterminism",
    )
    yield _module(
        "nanochat-sdpa-decode-window",
        "attention:window_lost_in_decode",
        "attention:window_kept_in_decode",
        MISTRAL,
        ATTENTION,
    )
    yield _module(
        "mps-sdpa-noncontig",
        "attention:strides_ignored",
        "attention:strides_kept",
        LLAMA,
        ATTENTION,
    )


def _masks() -> Iterator[Planted]:
    for bug, plant, control, model in (
        ("swa-cb-mask-sign", "band_of_other_sign", "band", MISTRAL),
        ("swa-flash-vs-eager-mistral", "window_one_longer_in_prefill", "band", MISTRAL),
        (
            "swa-applied-when-disabled",
            "window_that_is_switched_off",
            "window_that_is_switched_off_is_not_used",
            "qwen2, window off",
        ),
        ("moonshine-right-window", "right_window_one_shorter", "both_windows", "modernbert"),
        ("gemma3-layer-pattern-lost", "layer_pattern_lost", "layer_pattern", "gemma3"),
    ):
        yield _module(bug, f"masks:{plant}", f"masks:{control}", model, "model")


def _rotary() -> Iterator[Planted]:
    yield _module(
        "rope-te-lowp-apply",
        "rotary:rotated_in_bfloat16",
        "rotary:rotated",
        "llama, theta 500000",
        ATTENTION,
        dtypes=FLOAT32,
    )
    yield _module(
        "rope-theta-v5-getattr",
        "rotary:theta_of_moved_key",
        "rotary:theta",
        "llama, theta 500000",
        "model.rotary_emb",
        "weight-mismatch",
    )
    yield _module(
        "yarn-mscale-family",
        "rotary:yarn_factor_squared",
        "rotary:yarn_factor",
        "llama, yarn",
        "model.rotary_emb",
    )


def _caches() -> Iterator[Planted]:
    for bug, plant, control, model in (
        (
            "gemma-rotating-cache-chunk",
            "slots_of_later_chunk_shifted",
            "slots_of_later_chunk",
            MISTRAL,
        ),
        ("sglang-radix-insert-race", "prefix_of_other_text", "prefix_of_own_text", LLAMA),
        ("kvscale-all-ones", "scale_of_one", "scale_that_was_calibrated", "llama, large keys"),
        (
            "kvscale-stale-captured",
            "scale_captured_before_it_was_set",
            "scale_read_when_it_is_used",
            LLAMA,
        ),
    ):
        yield _module(bug, f"caches:{plant}", f"caches:{control}", model, ATTENTION)


def _experts() -> Iterator[Planted]:
    for bug, plant, control, model in (
        ("moe-topk-not-renorm", "not_renormalised", "renormalised", MIXTRAL),
        (
            "moe-top1-norm-wrong-axis",
            "normalised_over_tokens",
            "normalised_over_experts",
            "mixtral, 1 expert",
        ),
        (
            "moe-top1-router-no-grad",
            "one_expert_always_counts_fully",
            "one_expert_counts_by_its_weight",
            "olmoe, 1 expert",
        ),
    ):
        yield _module(bug, f"experts:{plant}", f"experts:{control}", model, f"{LAYER}.mlp.gate")


def _products() -> Iterator[Planted]:
    for bug, plant, control, model, module in (
        (
            "mps-matmul-out-strided",
            "second_half_of_buffer_not_written",
            "both_halves_of_buffer_written",
            LLAMA,
            f"{LAYER}.mlp",
        ),
        (
            "rocm-skinny-gemm-k",
            "decode_sums_a_part",
            "decode_sums_all",
            LLAMA,
            f"{LAYER}.mlp.down_proj",
        ),
        (
            "norm-eps-default",
            "default_epsilon",
            "configured_epsilon",
            GEMMA2,
            f"{LAYER}.post_feedforward_layernorm",
        ),
    ):
        yield _module(bug, f"products:{plant}", f"products:{control}", model, module)


def _weights() -> Iterator[Planted]:
    query = f"{ATTENTION}.q_proj"
    for bug, plant, control, model, module in (
        (
            "peft-negative-weight-merge",
            "merged_without_sign",
            "merged_with_sign",
            "llama, merged adapter",
            query,
        ),
        (
            "gptq-block-index",
            "errors_written_beside_the_group",
            "errors_written_for_all_groups",
            "llama, 4 bits",
            query,
        ),
        (
            "grok2-presharded-partial",
            "part_of_expert_not_filled",
            "expert_filled",
            MIXTRAL,
            f"{LAYER}.mlp.experts",
        ),
        (
            "load-reinit-custom-subclass",
            "initialised_again_after_load",
            "loaded_again",
            LLAMA,
            query,
        ),
        (
            "traincheck-tf-17877",
            "initialised_once_too_often",
            "initialised_once",
            "micro:llama?trained=0",
            f"{ATTENTION}.o_proj",
        ),
    ):
        yield _module(
            bug, f"weights:{plant}", f"weights:{control}", model, module, "weight-mismatch"
        )


def _loop() -> Iterator[Planted]:
    for bug, plant, control in (
        ("leftpad-generic-links", "decode_positions_shared", "decode_positions"),
        ("double-bos", "begins_twice", "begins_once"),
    ):
        yield _module(
            bug, f"loop:{plant}", f"loop:{control}", LLAMA, "", "inputs-differ", phase="inputs"
        )


def _module(
    bug: str,
    plant: str,
    control: str,
    model: str,
    module: str,
    diagnosis: Diagnosis = "module-error",
    *,
    dtypes: tuple[str, ...] = BOTH,
    phase: Phase = "forward",
) -> Planted:
    return Planted(bug, plant, control, model, phase, module, (diagnosis,), dtypes)
