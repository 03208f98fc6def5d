"""A handmade expectation, which keeps two of four ids.

Shapes: one batch of one row; R tokens, K kept ids and the rest, M projections.
"""

from assay_expectations.records import (
    Content,
    Distributions,
    Expectation,
    Key,
    Machine,
    Observed,
    Provenance,
    Settings,
    Signature,
    Weight,
)

MACHINE = Machine(vendor="acme", architecture="a1", dtype="bfloat16", precision="bfloat16")
WEIGHT = Weight(dtype="BF16", shape=[2, 3], hash="h")
CONTENT = Content(
    tokenizer_hash="t", prompts_hash="p", settings=Settings(top_k=2), weights={"a.weight": WEIGHT}
)
VERSIONS = {"torch": "2.13.0", "driver": "7"}
PROVENANCE = Provenance(
    run="acme/bfloat16", product="Acme 1", versions=VERSIONS, torch_settings={"num_threads": 1}
)

# The kept values are 1 away from their mean, so their standard deviation is 1, as is the vocabulary's.
YARDSTICK = [-1.0, -3.0]
REST = -2.0
NOISE = 0.01


def distributions(*tokens: list[float], rest: float = REST) -> Distributions:
    """Distributions with the given kept log-probabilities, and an equal error in the projection."""
    return Distributions(
        log_probabilities=[[[[*kept, rest] for kept in tokens]]],
        projections=[[[[kept[0]] for kept in tokens]]],
    )


def off(error: float) -> list[float]:
    """Kept log-probabilities that differ from the yardstick by `error`."""
    return [YARDSTICK[0] + error, YARDSTICK[1] - error]


def expectation(num_tokens: int = 1, noise: float = NOISE) -> Expectation:
    """An expectation whose captured run differs from the yardstick by `noise`."""
    return Expectation(
        model="micro:llama",
        key=Key(machine=MACHINE, content=CONTENT),
        captures=[{"logits-error": 1.0, "logits-worst": 1.0, "logits-whole": 1.0}],
        limits={"logits-error": 2.0, "logits-worst": 3.0, "logits-whole": 2.0},
        limits_origin="by hand",
        signature=Signature(
            tokens=[[[0] * num_tokens]],
            top_ids=[[[[0, 1]] * num_tokens]],
            spreads=[[[1.0] * num_tokens]],
            yardstick=distributions(*[YARDSTICK] * num_tokens),
            captured=distributions(*[off(noise)] * num_tokens),
        ),
        config={"config.json: rms_norm_eps": 1e-06},
        provenance=PROVENANCE,
    )


def observed(given: Distributions, dtype: str = "bfloat16") -> Observed:
    """An observation."""
    return Observed(distributions=given, dtype=dtype)
