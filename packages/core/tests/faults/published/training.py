"""Published bugs that show when a model is trained in one process."""

from collections.abc import Iterator
from dataclasses import replace

from assay.sites import Phase
from assay.verdicts import Diagnosis
from packages.core.tests.faults.published.planted import BOTH, FLOAT32, Planted, Training

LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
LLAMA = "micro:llama"
BALANCED = "own code: mixtral, balanced"
ADAPTER = Training(features=("lora",))


def training() -> Iterator[Planted]:
    """Every bug of training in one process."""
    for part in (_models, _losses, _gradients, _optimizers, _checkpoints, _adapters, _packing):
        yield from part()


def _models() -> Iterator[Planted]:
    for bug, plant, model in (
        ("fa4-mla-dv-misaligned", "columns_of_values_misaligned", LLAMA),
        ("fa-blocksparse-bwd", "queries_300_times", LLAMA),
    ):
        yield _setup(bug, plant, "gradients_as_they_are", "backward", ATTENTION, model=model)
    rows: tuple[tuple[str, str, str, Phase, str, str], ...] = (
        (
            "gqa-bwd-head-map",
            "heads_summed_by_remainder",
            "heads_summed_by_group",
            "backward",
            ATTENTION,
            "llama, 8 heads, 2 of keys",
        ),
        (
            "inductor-layernorm-shared-modulation-grad",
            "part_of_norm_gradient_stale",
            "norm_gradient_written",
            "backward",
            f"{LAYER}.input_layernorm",
            LLAMA,
        ),
        (
            "swa-not-carried-to-sdpa",
            "window_lost_in_training",
            "window_kept_in_training",
            "forward",
            ATTENTION,
            "micro:mistral",
        ),
        (
            "grpo-temperature-missing",
            "temperature_missing",
            "temperature",
            "forward",
            "",
            "granite, logits divided",
        ),
        (
            "moe-aux-autoscaler-discarded",
            "aux_loss_not_attached",
            "aux_loss_attached",
            "backward",
            f"{LAYER}.mlp.gate",
            BALANCED,
        ),
        (
            "moe-aux-tp-scale",
            "aux_loss_twice",
            "aux_loss_attached",
            "backward",
            f"{LAYER}.mlp.gate",
            BALANCED,
        ),
    )
    for bug, plant, control, phase, module, model in rows:
        yield _setup(bug, plant, control, phase, module, model=model)
    # Half of a gradient is what a reduction that is lost leaves, too.
    yield _setup(
        "tp-row-bias-grad",
        "half_of_bias_detached",
        "both_halves_of_bias_kept",
        "backward",
        f"{ATTENTION}.o_proj",
        "module-error",
        "missing-reduction",
        model="llama, biases",
    )
    yield _setup(
        "moe-gate-load-double",
        "load_counted_again_in_backward",
        "load_counted_once",
        "optimizer",
        f"{LAYER}.mlp.gate",
        "optimizer-update",
        model=BALANCED,
        training=Training(features=("recompute",)),
    )


def _losses() -> Iterator[Planted]:
    yield _trainer(
        "loss-double-shift", "losses:ShiftedTwice", "losses:OwnLoss", "inputs", "", "inputs-differ"
    )
    masked = _trainer(
        "collator-eos-masked", "losses:MaskedById", "losses:MaskedByMask", "inputs", "", "inputs-differ",
    )  # fmt: skip
    yield replace(masked, model="llama, padded by a line end")
    yield _trainer("olmo-zloss-always-on", "losses:ZLossAlwaysOn", "losses:OwnLoss", "forward", "")
    yield _trainer(
        "trainer-ngpu-loss-norm",
        "losses:EachReplicaDividesByAll",
        "losses:EachReplicaAddsItsShare",
        "forward",
        "",
        "loss-scale",
    )
    yield _trainer(
        "liger-reduction-none-zero-grad",
        "losses:FirstTokensWeightForAll",
        "losses:WeightedLoss",
        "backward",
        "",
    )
    yield _trainer(
        "traincheck-tf-34204",
        "losses:BatchTakenForOneSample",
        "losses:StepsOfOwn",
        "inputs",
        None,
        "inputs-differ",
    )


def _gradients() -> Iterator[Planted]:
    yield _trainer(
        "zero2-offload-microstep",
        "losses:FirstMicroBatchOverwritten",
        "losses:OwnBuffers",
        "backward",
        None,
        "missing-reduction",
        training=Training(micro_batches=4),
    )
    yield _trainer(
        "bf16-grad-accum",
        "losses:AddedUpInBfloat16",
        "losses:OwnBuffers",
        "backward",
        None,
        dtypes=FLOAT32,
        training=Training(micro_batches=8),
    )
    yield _trainer(
        "traincheck-so-60335387",
        "losses:GradientsKept",
        "losses:GradientsSetToZero",
        "backward",
        None,
    )
    yield _trainer(
        "ds-scale-updated-before-unscale",
        "losses:ScaleGrowsFirst",
        "losses:DynamicScale",
        "reduce",
        None,
        "loss-scale",
    )


def _optimizers() -> Iterator[Planted]:
    for bug, plant, control in (
        ("hf-scheduler-numprocs", "ScheduledByRanks", "Scheduled"),
        ("accelerate-scheduler-ga", "ScheduledByMicroBatches", "Scheduled"),
        ("hf-decay-rmsnorm", "DecayOfNorms", "DecayByClass"),
        ("offload-opt-random-master", "MastersOfRandomWeights", "OffloadedMasters"),
    ):
        yield _trainer(
            bug,
            f"optimizers:{plant}",
            f"optimizers:{control}",
            "optimizer",
            None,
            "optimizer-update",
        )
    yield _trainer(
        "hdo-stale-grad",
        "optimizers:GradientOfStepBefore",
        "optimizers:SparseRows",
        "optimizer",
        "model.embed_tokens",
        "optimizer-update",
    )
    yield _trainer(
        "fused-opt-state-truncated",
        "optimizers:MomentsInParameterDtype",
        "optimizers:OwnMoments",
        "optimizer",
        None,
        "optimizer-update",
        dtypes=FLOAT32,
    )
    yield _trainer(
        "apex-param-remainder",
        "optimizers:RebuiltWithoutTies",
        "optimizers:RebuiltWeights",
        "optimizer",
        "lm_head",
        "optimizer-update",
        dtypes=FLOAT32,
    )
    yield _trainer(
        "traincheck-pt-115607",
        "optimizers:GraphWithoutGradientsReused",
        "optimizers:GuardedStep",
        "optimizer",
        None,
        "frozen-parameters",
        "optimizer-update",
    )


def _checkpoints() -> Iterator[Planted]:
    for bug, plant, control, module in (
        ("save-fsdp-shared-tensor-removed", "TakenForShared", "OwnStateDict", "model.norm"),
        ("traincheck-tf-29903", "OneKeyIsAnAlias", "OwnStateDict", f"{LAYER}.mlp.up_proj"),
        ("ckpt-tracker-wrong-step", "TrackedLater", "OwnTracker", None),
        ("opt-moments-dropped-lazy", "OnlyWhatTheTemplateHas", "OwnOptimizerState", None),
        ("opt-state-position-shift", "PlacedByPosition", "OwnOptimizerState", None),
    ):
        yield _checkpoint(bug, plant, control, module)
    yield _checkpoint(
        "traincheck-ds-5489",
        "FrozenLeftOut",
        "OwnStateDict",
        "model.embed_tokens",
        model="own code: llama, embedding frozen",
    )
    yield _checkpoint(
        "async-save-stale-cache",
        "StaleHandles",
        "KeptHandles",
        None,
    )


def _adapters() -> Iterator[Planted]:
    yield _trainer(
        "peft-load-silent-random",
        "checkpoints:PrefixDoubled",
        "checkpoints:OwnAdapterLoading",
        "checkpoint",
        None,
        "adapter-mismatch",
        training=ADAPTER,
    )
    yield _trainer(
        "lora-rslora-scale",
        "checkpoints:OtherScale",
        "checkpoints:OwnScale",
        "forward",
        None,
        "adapter-mismatch",
        training=ADAPTER,
    )
    yield _trainer(
        "lora-ckpt-reentrant-nograd",
        "checkpoints:RecomputesWithoutGradients",
        "checkpoints:RecomputesWithGradients",
        "backward",
        None,
        training=ADAPTER,
    )


def _packing() -> Iterator[Planted]:
    yield _trainer(
        "pack-leak-sdpa",
        "packing:PackedWithPlainMask",
        "packing:Packed",
        "forward",
        None,
    )


def _setup(
    bug: str,
    plant: str,
    control: str,
    phase: Phase,
    module: str,
    *diagnoses: Diagnosis,
    model: str = LLAMA,
    training: Training = Training(),  # noqa: B008 - it is frozen
) -> Planted:
    return Planted(
        bug,
        f"setups:{plant}",
        f"setups:{control}",
        model,
        phase,
        module,
        diagnoses or ("module-error",),
        training=training,
    )


def _checkpoint(
    bug: str,
    plant: str,
    control: str,
    module: str | None,
    *,
    model: str = LLAMA,
) -> Planted:
    return Planted(
        bug,
        f"checkpoints:{plant}",
        f"checkpoints:{control}",
        model,
        "checkpoint",
        module,
        ("checkpoint-mismatch",),
        training=Training(),
    )


def _trainer(
    bug: str,
    plant: str,
    control: str,
    phase: Phase,
    module: str | None,
    *diagnoses: Diagnosis,
    dtypes: tuple[str, ...] = BOTH,
    training: Training = Training(),  # noqa: B008 - it is frozen
) -> Planted:
    return Planted(
        bug,
        plant,
        control,
        LLAMA,
        phase,
        module,
        diagnoses or ("module-error",),
        dtypes,
        training,
    )
