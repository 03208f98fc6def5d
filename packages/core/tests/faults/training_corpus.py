"""The planted faults of training, each with the right verdict."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assay.sites import Phase
from assay.verdicts import Diagnosis

PLANTS = Path(__file__).parent / "training_plants"
BOTH = ("float32", "bfloat16")

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
INPUT_NORM = "model.layers.1.input_layernorm"


@dataclass(frozen=True)
class TrainingFault:
    """A plant in the training of a micro model.

    plant: FILE:NAME below `training_plants`; of trainers a class, of setups a function.
    module: where the error is made; None where it is no single module.
    mesh: as `--mesh` takes it; empty for a single process.
    features: what the trainer is asked for, such as `mixed-precision`.
    adapter_dropout: of the adapter; None as a check has it, which is none on ranks.
    """

    plant: str
    dtype: str
    phase: Phase
    diagnosis: Diagnosis
    module: str | None = None
    lora: bool = False
    mesh: str = ""
    micro_batches: int = 2
    model: str = "micro:llama"
    features: tuple[str, ...] = ()
    adapter_dropout: float | None = None

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        return f"{self.plant} {self.dtype}"

    @property
    def reference(self) -> str:
        """The value of the command-line option."""
        file, _, name = self.plant.partition(":")
        return f"{PLANTS / file}.py:{name}"

    @property
    def trainer(self) -> str | None:
        """For `--candidate-trainer`."""
        return self.reference if self._is_class else None

    @property
    def setup(self) -> str | None:
        """For `--candidate-setup`."""
        return None if self._is_class else self.reference

    @property
    def _is_class(self) -> bool:
        return self.plant.rpartition(":")[2][0].isupper()


def training_corpus() -> Iterator[TrainingFault]:
    """Every fault in every dtype."""
    parts = (
        _losses,
        _reductions,
        _clips,
        _optimizers,
        _checkpoints,
        _kept_state,
        _around_the_step,
        _backward,
        _recomputed,
        _promises,
        _batch_rows,
        _others,
        _conventions,
        _features,
    )
    for part in parts:
        yield from part()


def _losses() -> Iterator[TrainingFault]:
    for name in ("MeanOfMeans", "NotDividedByMicroBatches"):
        yield from _trainer(name, "forward", "loss-scale", "")
    yield from _trainer("BackwardOfScaledLoss", "backward", "loss-scale", "")
    for name in ("LabelsShiftedTwice", "PaddingLearned"):
        yield from _trainer(name, "inputs", "inputs-differ", "")
    for name in ("LabelsNotShifted", "PromptsLearned"):
        yield from _trainer(name, "inputs", "inputs-differ", "", file="parts")
    yield from _trainer("LossIsNaN", "forward", "non-finite", "")
    yield from _trainer("MicroBatchesReordered", "inputs", "inputs-differ", "")


def _reductions() -> Iterator[TrainingFault]:
    yield from _trainer("OnlyTheLastMicroBatch", "backward", "missing-reduction")
    yield from _trainer("LastBackwardSkipped", "backward", "missing-reduction", file="parts")
    yield from _trainer("FirstMicroBatchTwice", "backward", "loss-scale", "", file="parts")
    yield from _trainer("LossScaleNotTakenOut", "reduce", "loss-scale")
    yield from _trainer("ReducedAsMeanOfSums", "reduce", "loss-scale")
    yield from _trainer(
        "HalfOfTheReductionLost", "reduce", "missing-reduction", "model.layers.2.mlp.gate_proj"
    )


def _clips() -> Iterator[TrainingFault]:
    for name in ("ClippedByHalfOfTheNorm", "ClippedOneByOne", "NotClipped", "ClippedByLargest"):
        yield from _trainer(name, "clip", "clip-norm")


def _optimizers() -> Iterator[TrainingFault]:
    yield from _trainer("OptimizerOverClones", "optimizer", "frozen-parameters")
    yield from _trainer("OneParameterLeftOut", "optimizer", "frozen-parameters", "model.norm")
    yield from _trainer("NormsLeftOut", "optimizer", "frozen-parameters", file="parts")
    for name in (
        "DecayNotDecoupled",
        "OtherBeta",
        "TwiceTheLearningRate",
        "BiasNotCorrected",
        "SteppedTwice",
        "WeightsShrunkAfterwards",
    ):
        yield from _trainer(name, "optimizer", "optimizer-update")
    for name in (
        "UpdatesTooSmall", "FirstUpdateTooSmall", "LearningRateTooLarge", "LastUpdateTooLarge",
    ):  # fmt: skip
        yield from _trainer(name, "optimizer", "optimizer-update", file="scaled_updates")
    yield from _setup("embedding_frozen", "optimizer", "frozen-parameters", "model.embed_tokens")
    yield from _trainer(
        "BaseNotFrozen", "optimizer", "optimizer-update", "model.embed_tokens", lora=True
    )


def _checkpoints() -> Iterator[TrainingFault]:
    for name in ("MomentsDropped", "StepCountReset", "WeightsNotLoaded"):
        yield from _trainer(name, "checkpoint", "checkpoint-mismatch")
    yield from _trainer("GeneratorsNotRestored", "checkpoint", "rng-state")
    yield from _trainer(
        "OneTensorSavedAsZeros", "checkpoint", "checkpoint-mismatch", f"{ATTENTION}.o_proj"
    )
    yield from _trainer(
        "NeighboursExchangedOnSave",
        "checkpoint",
        "checkpoint-mismatch",
        "model.layers.0.mlp.up_proj",
    )
    yield from _trainer("SavedOneStepLate", "checkpoint", "checkpoint-mismatch")
    yield from _trainer("AdapterMergedOnLoad", "checkpoint", "adapter-mismatch", lora=True)
    yield from _trainer("AdapterSavedAsZeros", "checkpoint", "adapter-mismatch", lora=True)
    yield from _trainer("AdapterSavedWithoutTensors", "checkpoint", "adapter-mismatch", lora=True)


def _kept_state() -> Iterator[TrainingFault]:
    for name in (
        "MasterWeightsForgotten",
        "MomentsForgottenInSecret",
        "FirstMomentsSavedAgain",
        "OtherSettingsSaved",
    ):
        yield from _trainer(name, "checkpoint", "checkpoint-mismatch", file="kept_state")
    yield from _trainer(
        "OtherScaleSaved", "checkpoint", "adapter-mismatch", file="kept_state", lora=True
    )
    for name in ("OptimizerMadeAnew", "MicroBatchesCounted", "ShrunkWhileClipping"):
        yield from _trainer(name, "optimizer", "optimizer-update", file="kept_state")
    yield from _trainer(
        "BaseShrunkAfterwards", "optimizer", "optimizer-update", file="kept_state", lora=True
    )


def _around_the_step() -> Iterator[TrainingFault]:
    for name in (
        "SavingDropsMoments",
        "SavingLowersTheRate",
        "HalfPrecisionDeclared",
        "OtherEndOfTextSaved",
    ):
        yield from _trainer(name, "checkpoint", "checkpoint-mismatch", file="around_the_step")
    yield from _trainer(
        "SavingFreezesTheHead",
        "checkpoint",
        "checkpoint-mismatch",
        "lm_head",
        file="around_the_step",
    )
    for name in ("CountsTwice", "SecondStepSkipped"):
        yield from _trainer(name, "optimizer", "optimizer-update", file="around_the_step")
    for name in ("FewerLayersNamed", "AdapterLeavesOutLayers"):
        yield from _trainer(
            name, "checkpoint", "adapter-mismatch", file="around_the_step", lora=True
        )
    for name in ("AdapterStartsAtZero", "AdapterOfRankOne"):
        yield from _trainer(name, "forward", "adapter-mismatch", file="around_the_step", lora=True)
    yield from _trainer("MasksRepeated", "forward", "rng-state", file="around_the_step", lora=True)
    for dtype in BOTH:
        yield TrainingFault(
            "ranks:AllRanksSeededAlike", dtype, "forward", "rng-state", lora=True, mesh="dp=2",
            adapter_dropout=0.1,
        )  # fmt: skip
        yield TrainingFault(
            "around_the_step:LargestPartWins", dtype, "reduce", "missing-reduction", mesh="dp=2"
        )
    # In bfloat16 they are below what the noise of a free run hides.
    for name in ("SavingLeavesAHook", "ThirdUpdateIsHalf"):
        yield TrainingFault(f"around_the_step:{name}", "float32", "optimizer", "optimizer-update")


def _backward() -> Iterator[TrainingFault]:
    for name, module in (
        ("key_head_detached", f"{ATTENTION}.k_proj"),
        ("value_head_detached", f"{ATTENTION}.v_proj"),
        ("key_gradient_2_percent", f"{ATTENTION}.k_proj"),
        ("down_gradient_5_per_mille", f"{MLP}.down_proj"),
        ("norm_without_gradient_of_root", "model.layers.1.post_attention_layernorm"),
        ("residual_detached", "model.layers.1"),
        ("embedding_gradient_of_padding_token", "model.embed_tokens"),
        ("sigmoid_gradient_wrong", f"{MLP}.act_fn"),
    ):
        yield from _setup(name, "backward", "module-error", module)
    yield from _setup(
        "activation_gradient_in_bfloat16",
        "backward",
        "module-error",
        f"{MLP}.act_fn",
        dtypes=("float32",),
    )
    yield from _setup("norm_weights_detached_on_half", "backward", "missing-reduction")
    yield from _setup("one_norm_detached_on_half", "backward", "missing-reduction", INPUT_NORM)
    yield from _trainer("RecomputeLosesGenerator", "backward", "rng-state", lora=True)


def _recomputed() -> Iterator[TrainingFault]:
    for name in (
        "input_kept_in_8_bits",
        "rows_of_input_exchanged",
        "rotary_turned_backwards",
        "mask_left_out",
        "residual_doubled",
    ):
        for dtype in BOTH:
            plant = f"recomputed:{name}"
            yield TrainingFault(plant, dtype, "backward", "module-error", "model.layers.1")
    for dtype in BOTH:
        yield TrainingFault(
            "recomputed:near_ties_decided_otherwise",
            dtype,
            "backward",
            "module-error",
            "model.layers.1.mlp.gate",
            model="micro:mixtral",
        )


def _batch_rows() -> Iterator[TrainingFault]:
    for name, module in (
        ("first_tile_of_the_first_row", MLP),
        ("keys_of_the_first_row", f"{ATTENTION}.k_proj"),
        ("lengths_in_place_of_the_mask", ATTENTION),
    ):
        yield from _setup(name, "forward", "module-error", module, file="batch_rows")
    name, module = "gradients_of_another_row", f"{MLP}.act_fn"
    yield from _setup(name, "backward", "module-error", module, file="batch_rows")
    for dtype in BOTH:
        plant = "batch_rows:StageBuiltAnew"
        yield TrainingFault(plant, dtype, "backward", "missing-reduction", mesh="pp=2")


def _promises() -> Iterator[TrainingFault]:
    """In float32 nothing is kept wider than it is computed."""
    up = "model.layers.1.mlp.up_proj"
    found: tuple[tuple[str, Phase, Diagnosis, str | None], ...] = (
        ("NoMasterWeights", "optimizer", "optimizer-update", None),
        ("OneLayerCast", "optimizer", "optimizer-update", "model.layers.2.mlp.gate_proj"),
        ("WeightsRoundedAfterEachStep", "optimizer", "optimizer-update", None),
        ("WeightsRoundedBeforeEachStep", "optimizer", "optimizer-update", None),
        ("SecondMomentRounded", "optimizer", "optimizer-update", None),
        ("SumsRoundedToBfloat16", "backward", "module-error", None),
        ("SumOfOneWeightRounded", "backward", "module-error", up),
    )
    for name, phase, diagnosis, module in found:
        plant = f"promises:{name}"
        features = ("mixed-precision",)
        yield TrainingFault(plant, "bfloat16", phase, diagnosis, module, features=features)


def _others() -> Iterator[TrainingFault]:
    down = f"{MLP}.down_proj"
    yield from _setup("down_weights_2_percent", "forward", "weight-mismatch", down)
    yield from _setup("down_outputs_2_percent", "forward", "module-error", down)


def _conventions() -> Iterator[TrainingFault]:
    """Beside `false_alarms/library_trainers.py`, whose conventions these break."""
    for name, phase, diagnosis in _BROKEN_CONVENTIONS:
        yield from _trainer(name, phase, diagnosis, file="conventions")
    for dtype in BOTH:
        for name, phase in (
            ("AveragedWithoutFactor", "backward"),
            ("FactorOfRanksAddedUp", "forward"),
        ):
            plant = f"conventions:{name}"
            yield TrainingFault(plant, dtype, phase, "loss-scale", mesh="dp=2")
        plant = "conventions:AveragedSharesUnderAScale"
        yield TrainingFault(plant, dtype, "clip", "loss-scale", mesh="dp=2")


_BROKEN_CONVENTIONS: tuple[tuple[str, Phase, Diagnosis], ...] = (
    ("ClippedBeforeUnscaling", "clip", "clip-norm"),
    ("UnscaledAfterClipping", "clip", "clip-norm"),
    ("ScaledTwice", "clip", "loss-scale"),
    ("UnscaledByAnotherFactor", "clip", "loss-scale"),
    ("ReducedByAnotherFactor", "reduce", "loss-scale"),
    ("UnscaledOnOneParameterOnly", "reduce", "missing-reduction"),
    ("AccumulatedTwice", "backward", "loss-scale"),
    ("SkippedInSilence", "optimizer", "frozen-parameters"),
    ("DecaysWhileSkipping", "optimizer", "optimizer-update"),
    ("RowsSeeEachOther", "forward", "module-error"),
)


def _features() -> Iterator[TrainingFault]:
    """Beside the trainer that is asked for the same feature."""
    found: tuple[tuple[str, str, Phase, Diagnosis, str | None], ...] = (
        ("SeamLost", "packed", "forward", "module-error", "model"),
        ("PaddingIsARow", "packed", "inputs", "inputs-differ", None),
        ("LabelAcrossTheSeam", "packed", "inputs", "inputs-differ", None),
        ("ClippedAsItIsScaled", "loss-scaling", "clip", "clip-norm", None),
        ("UnscaledByTheNextScale", "loss-scaling", "clip", "loss-scale", None),
        ("ScaleNotRestored", "loss-scaling", "checkpoint", "checkpoint-mismatch", None),
        ("OtherActivation", "compile", "forward", "module-error", f"{MLP}.act_fn"),
        ("OtherActivationInOnePiece", "compile", "optimizer", "optimizer-update", None),
    )
    for dtype in BOTH:
        for name, feature, phase, diagnosis, module in found:
            plant = f"features:{name}"
            yield TrainingFault(plant, dtype, phase, diagnosis, module, features=(feature,))
    # Only in float16 something overflows.
    scaled = ("mixed-precision", "loss-scaling")
    yield TrainingFault(
        "features:StepsInSpiteOfOverflow", "float16", "backward", "loss-scale", features=scaled
    )
    yield TrainingFault(
        "features:FoundInfNotReduced", "float16", "optimizer", "optimizer-update", mesh="dp=2",
        features=scaled,
    )  # fmt: skip


def _trainer(
    name: str,
    phase: Phase,
    diagnosis: Diagnosis,
    module: str | None = None,
    *,
    file: str = "trainers",
    lora: bool = False,
) -> Iterator[TrainingFault]:
    for dtype in BOTH:
        yield TrainingFault(f"{file}:{name}", dtype, phase, diagnosis, module, lora=lora)


def _setup(
    name: str,
    phase: Phase,
    diagnosis: Diagnosis,
    module: str | None = None,
    *,
    dtypes: tuple[str, ...] = BOTH,
    file: str = "setups",
) -> Iterator[TrainingFault]:
    for dtype in dtypes:
        yield TrainingFault(f"{file}:{name}", dtype, phase, diagnosis, module)
