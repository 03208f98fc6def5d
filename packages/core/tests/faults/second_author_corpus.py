"""Faults of training by another author than the rules, each with the right verdict.

The right verdicts were written down before the rules were read or run, and are not fitted.
"""

from collections.abc import Iterator
from dataclasses import replace

from assay.sites import Phase
from assay.verdicts import Diagnosis
from packages.core.tests.faults.training_corpus import TrainingFault


def second_author_corpus() -> Iterator[TrainingFault]:
    """Every fault in float32, and those marked for it in bfloat16."""
    for part in (_losses, _backward, _clips, _optimizers, _checkpoints, _data, _tensor, _pipeline):
        yield from part()


def _losses() -> Iterator[TrainingFault]:
    yield _fault("ZLossAdded", "forward", "module-error", "")
    yield from _both(_fault("LabelSmoothingLeftOn", "forward", "module-error", ""))
    yield _fault("LossInBfloat16", "forward", "module-error", "")
    yield _fault("LastPositionDropped", "inputs", "inputs-differ", "")
    yield from _both(_fault("LogitsCapped", "forward", "module-error", ""))
    yield _fault("RowsInOtherOrder", "inputs", "inputs-differ")


def _backward() -> Iterator[TrainingFault]:
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    yield from _both(
        _setup("rope_turned_forwards_in_backward", "backward", "module-error", attention)
    )
    yield from _both(_setup("product_without_gate_in_backward", "backward", "module-error", mlp))
    yield _setup("last_norm_by_raw_input", "backward", "module-error", "model.norm")
    query = "model.layers.2.self_attn.q_proj"
    yield from _both(_setup("one_query_head_scaled", "backward", "module-error", query))
    yield _setup("mlp_branch_detached", "backward", "module-error", "model.layers.2.mlp")
    up = "model.layers.0.mlp.up_proj"
    yield _setup("up_input_saved_in_8_bits", "backward", "module-error", up)
    dropout = _fault("DropoutDrawsAnewInBackward", "backward", "rng-state")
    yield replace(dropout, lora=True)


def _clips() -> Iterator[TrainingFault]:
    yield _fault("NormIsSumOfNorms", "clip", "clip-norm")
    yield from _both(_fault("ClippedByValue", "clip", "clip-norm"))
    # Where it shows is backward: all gradients of a micro-batch by one factor.
    yield _fault("ClippedAfterEachMicroBatch", "backward", "clip-norm")


def _optimizers() -> Iterator[TrainingFault]:
    for name in (
        "SecondMomentCorrectedByFirstBeta",
        "EpsilonInsideRoot",
        "NormsNotDecayed",
        "StepCounterStands",
    ):
        yield _fault(name, "optimizer", "optimizer-update")
    yield from _both(_fault("LastLayerLearnsFaster", "optimizer", "optimizer-update"))
    yield _fault("HeadIsUpdatedInACopy", "optimizer", "frozen-parameters", "lm_head")


def _checkpoints() -> Iterator[TrainingFault]:
    query = "model.layers.2.self_attn.q_proj"
    yield _fault("OneTensorSavedTransposed", "checkpoint", "checkpoint-mismatch", query)
    embedding = "model.embed_tokens"
    yield _fault("EmbeddingSavedInBfloat16", "checkpoint", "checkpoint-mismatch", embedding)
    for name in ("StepNumberLost", "ScheduleRestarts", "MomentsSavedInBfloat16"):
        yield _fault(name, "checkpoint", "checkpoint-mismatch")
    adapter = _fault("AdapterScaledTwice", "checkpoint", "adapter-mismatch")
    yield replace(adapter, lora=True)


def _data() -> Iterator[TrainingFault]:
    mesh = "dp=2"
    yield from _both(_fault("BucketLeftOut", "reduce", "missing-reduction", mesh=mesh))
    yield from _both(_fault("ReducedTwice", "reduce", "loss-scale", mesh=mesh))
    yield _fault("ReducedInBfloat16", "reduce", "module-error", mesh=mesh)
    twice = _fault("AccumulatesWithoutNoSync", "backward", "loss-scale", mesh=mesh)
    yield replace(twice, micro_batches=4)
    yield _fault("PromptLearnedOnRankOne", "inputs", "inputs-differ", "", mesh)
    gate = "model.layers.2.mlp.gate_proj"
    yield _fault("RankOneStartsElsewhere", "forward", "weight-mismatch", gate, mesh)
    yield _fault("BuffersDiffer", "forward", "weight-mismatch", "model.rotary_emb", mesh)
    up = "model.layers.0.mlp.up_proj"
    yield _fault("OneWeightDriftsOnRankOne", "optimizer", "replica-divergence", up, mesh)
    yield _fault("AveragesShards", "backward", "loss-scale", mesh=mesh)
    yield _fault("UnitNotSynchronised", "backward", "missing-reduction", mesh=mesh)
    yield _fault("ShardsReducedInBfloat16", "backward", "module-error", mesh=mesh)
    yield from _both(_fault("ClippedByOwnShards", "clip", "clip-norm", mesh=mesh))


def _tensor() -> Iterator[TrainingFault]:
    one, two, mesh = "model.layers.1", "model.layers.2", "tp=2"
    output = f"{one}.self_attn.o_proj"
    yield from _both(_fault("OutputNotSummed", "forward", "missing-reduction", output, mesh))
    yield _fault("DownSummedTwice", "forward", "module-error", f"{two}.mlp.down_proj", mesh)
    up = f"{one}.mlp.up_proj"
    yield from _both(_fault("ColumnInputNotSummed", "backward", "missing-reduction", up, mesh))
    norm = f"{one}.input_layernorm"
    yield _fault("NormSummedTwice", "backward", "missing-reduction", norm, mesh)
    yield _fault("EmbeddingStopsEarly", "forward", "module-error", "model.embed_tokens", mesh)
    yield _fault("KeyHeadsExchanged", "forward", "module-error", f"{one}.self_attn.k_proj", mesh)
    queries = f"{two}.self_attn.q_proj"
    yield _fault("QueryHeadsDealtInTurn", "forward", "module-error", queries, mesh)
    yield _fault("LogitsGatheredInOtherOrder", "forward", "module-error", "lm_head", mesh)
    yield _fault("WholeParametersCountTwice", "clip", "clip-norm", mesh=mesh)


def _pipeline() -> Iterator[TrainingFault]:
    mesh = "pp=2"
    yield _fault("LayersExchangedBetweenStages", "forward", "weight-mismatch", mesh=mesh)
    yield _fault("LayerRunTwice", "forward", "module-error", "model.layers.2", mesh)
    yield _fault("LayerLost", "forward", "module-error", "model.layers.1", mesh)
    yield _fault("HiddenStatesSentInBfloat16", "forward", "module-error", mesh=mesh)
    lost = _fault("GradientOfFirstMicroBatchLost", "backward", "missing-reduction", mesh=mesh)
    yield from _both(lost)
    yield _fault("MaskOfOtherRows", "forward", "module-error", mesh=mesh)
    yield _fault("ScheduleScalesGradients", "backward", "loss-scale", mesh=mesh)
    yield _fault("ClippedByStage", "clip", "clip-norm", mesh=mesh)


def _fault(
    name: str, phase: Phase, diagnosis: Diagnosis, module: str | None = None, mesh: str = ""
) -> TrainingFault:
    file = "second_author_ranks" if mesh else "second_author"
    return TrainingFault(f"{file}:{name}", "float32", phase, diagnosis, module, mesh=mesh)


def _setup(
    name: str, phase: Phase, diagnosis: Diagnosis, module: str | None = None
) -> TrainingFault:
    return TrainingFault(f"second_author_setups:{name}", "float32", phase, diagnosis, module)


def _both(fault: TrainingFault) -> Iterator[TrainingFault]:
    yield fault
    yield replace(fault, dtype="bfloat16")
