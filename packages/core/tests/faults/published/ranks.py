"""Published bugs that show on several ranks only."""

from collections.abc import Iterator

from assay.sites import Phase
from assay.verdicts import Diagnosis
from packages.core.tests.faults.published.planted import Planted, Training

LLAMA, MIXTRAL = "micro:llama", "micro:mixtral"


def ranks() -> Iterator[Planted]:
    """Every bug of several ranks."""
    yield _ranks(
        "rope-buffer-broadcast-reinterpret",
        "BytesReadAsBfloat16",
        "SharedFrequencies",
        "forward",
        "model.rotary_emb",
        "module-error",
        "weight-mismatch",
    )
    # Gradients of two parameters are mixed, replaced or zeroed: parts of the sums are missing.
    for bug, plant in (
        ("zero12-overlap-buffer-lifetime", "BufferUsedAgain"),
        ("zero2-grad-order-across-ranks", "OrderDiffersByRank"),
        ("traincheck-pt-84803", "SomeTransfersLost"),
        ("ddp-used-no-error-oos", "BucketNeverReady"),
    ):
        yield _ranks(bug, plant, "InBuckets", "reduce", None, "missing-reduction", "module-error")
    yield _ranks(
        "mlm-tied-embed-distopt",
        "OnlyOneCopyReduced",
        "TiedWeight",
        "reduce",
        "model.embed_tokens",
        "missing-reduction",
        model="llama, tied",
    )
    yield _ranks(
        "ddp-no-sync-unused",
        "ExpertNotInLastMicroBatch",
        "ExpertOfEveryMicroBatch",
        "reduce",
        "model.layers.1.mlp.experts",
        "missing-reduction",
        model=MIXTRAL,
    )
    yield _ranks(
        "clip-norm-ep-axis",
        "NormOverOwnExperts",
        "NormOverExperts",
        "clip",
        None,
        "clip-norm",
        model=MIXTRAL,
    )
    for bug, plant, control, mesh in (
        ("fsdp2-clip-local-norm", "NormOverReplicas", "NormOverShards", "dp=2"),
        ("fsdp-logged-norm-partial", "NormOfShardReported", "NormOverShards", "dp=2"),
        ("traincheck-ds-1801", "ClippedOnFirstRank", "ClippedOnAllRanks", "tp=2"),
    ):
        yield _ranks(bug, plant, control, "clip", None, "clip-norm", mesh=mesh)
    yield _ranks(
        "iterable-dup-across-ranks", "SameOnEachRank", "ByRank", "inputs", None, "inputs-differ"
    )


def _ranks(
    bug: str,
    plant: str,
    control: str,
    phase: Phase,
    module: str | None,
    *diagnoses: Diagnosis,
    model: str = LLAMA,
    mesh: str = "dp=2",
) -> Planted:
    return Planted(
        bug,
        f"ranks:{plant}",
        f"ranks:{control}",
        model,
        phase,
        module,
        diagnoses,
        training=Training(mesh=mesh),
    )
