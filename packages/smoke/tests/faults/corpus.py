"""Planted trainers, each with its case and the expected verdict."""

from dataclasses import dataclass

from assay_smoke.matrix.rules import Case

ONE = Case(framework="one-process", cards=1)
LORA = Case(framework="one-process", cards=1, features=frozenset({"lora"}))
MERGED = Case(framework="one-process", cards=1, features=frozenset({"lora"}), checkpoint="merged")
HUGGING_FACE = Case(framework="one-process", cards=1, checkpoint="hugging-face")
ACCUMULATION = Case(framework="one-process", cards=1, features=frozenset({"accumulation"}))
BFLOAT16 = Case(framework="one-process", cards=1, precision="bfloat16")
DDP = Case(framework="ddp", cards=2)
FSDP = Case(framework="fsdp", cards=2, checkpoint="sharded")
FSDP_4 = Case(framework="fsdp", cards=4, checkpoint="sharded")
OFFLOAD = Case(framework="fsdp", cards=2, features=frozenset({"offload"}), checkpoint="sharded")
ZERO2 = Case(framework="zero2", cards=2)
ZERO2_ACCUMULATION = Case(framework="zero2", cards=2, features=frozenset({"accumulation"}))
ZERO2_OFFLOAD = Case(framework="zero2", cards=2, features=frozenset({"offload"}))
ZERO2_BFLOAT16 = Case(framework="zero2", cards=2, precision="bfloat16")
SIGTERM = Case(framework="one-process", cards=1, interruption="sigterm")


@dataclass(frozen=True)
class Plant:
    """A class of planted_trainers.py or planted_deepspeed.py in a case."""

    trainer: str
    case: Case
    level: str
    """First level that has to fail."""
    diagnosis: str | None
    says: str = ""
    """Part of its reason."""


PLANTS = (
    Plant("MomentsDropped", ONE, "checkpoint", "checkpoint-mismatch", "exp_avg"),
    Plant("DrawsAfterLoading", LORA, "checkpoint", "adapter-mismatch", "loss of step 2"),
    Plant("RestoredOnlyInItsProcess", ONE, "resume", "checkpoint-mismatch"),
    Plant("OneShardZeroed", FSDP, "checkpoint", "checkpoint-mismatch", "layers.0"),
    Plant("AdapterSavedEmpty", LORA, "checkpoint", "adapter-mismatch", "lora_A"),
    Plant("AdapterMergedTwice", MERGED, "users", "adapter-mismatch", "merged"),
    Plant("SecondCheckpointRepeatsFirst", ONE, "checkpoint", "checkpoint-mismatch"),
    Plant("StartsFromOtherWeights", HUGGING_FACE, "restart", "checkpoint-mismatch", "begins with"),
    Plant("MasterWeightsNotRefreshed", BFLOAT16, "checkpoint", "checkpoint-mismatch"),
    Plant("OffloadKeepsStaleCopy", OFFLOAD, "trained", "frozen-parameters", "gate_proj"),
    Plant("FrozenParameterMoves", LORA, "trained", "optimizer-update", "norm.weight"),
    Plant("ParametersFrozen", ONE, "trained", "frozen-parameters", "never moved"),
    Plant("OnlyLastMicroBatch", ACCUMULATION, "loss", "optimizer-update"),
    Plant("LearningRateSteppedTooOften", ACCUMULATION, "loss", "optimizer-update"),
    Plant("LossIsNaN", ONE, "loss", "non-finite", "nan"),
    Plant("RankKilledInAStep", FSDP, "run", None, "SIGKILL"),
    Plant("HangsInTearDown", ONE, "run", None, "tear-down"),
    Plant("LeavesProcess", ONE, "left behind", None, "sleep"),
    Plant("DiskIsFull", ONE, "checkpoint", "checkpoint-mismatch", "No space left"),
    Plant("LeavesProcessInItsGroup", ONE, "left behind", None, "outlived the ranks"),
    Plant("SteppedTwiceAtTheEnd", ONE, "updates", "optimizer-update"),
    Plant("ReplicasDrift", DDP, "replicas", "replica-divergence"),
    Plant("KeepsTheModel", ONE, "tear-down", None, "outlive"),
    Plant("KeepsItsShards", FSDP_4, "tear-down", None, "outlive"),
    Plant("ZeroOnlyLastMicroBatch", ZERO2_ACCUMULATION, "loss", "optimizer-update"),
    Plant("ZeroOffloadKeepsStaleCopy", ZERO2_OFFLOAD, "trained", "frozen-parameters"),
    Plant("ZeroMastersNotRefreshed", ZERO2_BFLOAT16, "checkpoint", "checkpoint-mismatch"),
    Plant("ZeroShardZeroed", ZERO2, "checkpoint", "checkpoint-mismatch"),
    Plant("IgnoresSigterm", SIGTERM, "sigterm", "checkpoint-mismatch", "SIGTERM"),
    Plant("SavesNothingAfterSigterm", SIGTERM, "sigterm", "checkpoint-mismatch", "no checkpoint"),
)
