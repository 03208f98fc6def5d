"""Correct ways to train correct models, each against a golden of its own model, dtype and options.

float16 is among them under mixed precision alone: AdamW does not work in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.training.check import options_for
from assay.training.reports import TrainOptions

SETUPS = Path(__file__).parent / "setups.py"
TRAINERS = Path(__file__).parent / "trainers.py"
LIBRARIES = Path(__file__).parent / "library_trainers.py"
DTYPES = ("float32", "bfloat16")
DECODERS = ("micro:llama", "micro:mistral", "micro:gemma2", "micro:mixtral")
EAGER_ONLY = ("micro:gemma2",)  # sdpa has no soft caps
WITH_EXPERTS = ("micro:mixtral",)
RANK_TRAINERS = ("reference", "ddp", "fsdp")
MIXED = ("micro:llama", "micro:mixtral")
DIVIDED = ("micro:llama", "micro:mistral", "micro:mixtral")

Mesh = tuple[tuple[str, int], ...]
Options = tuple[tuple[str, object], ...]
AS_BY_DEFAULT: Options = ()
OTHER_STEPS: tuple[Options, ...] = (
    (("seed", 1), ("micro_batches", 3)),
    (("seed", 2), ("steps", 4)),
    (("seed", 3), ("micro_batches", 4)),
    (("seed", 4), ("steps", 4), ("micro_batches", 3)),
)
FOUR_MICRO_BATCHES = OTHER_STEPS[2]
ADAPTER: Options = (("lora", True),)
ADAPTER_IN_STAGES: Options = (
    ("lora", True), ("shapes", "equal-first-step"), ("micro_batches", 4)
)  # fmt: skip
# As the trainer `pipeline` takes them.
IN_STAGES: Options = (("shapes", "equal-first-step"), ("micro_batches", 4))
# Several steps after the restart: sums are then added up in another order on more than two ranks.
LONGER: Options = (("seed", 5), ("steps", 5), ("micro_batches", 4))
OTHER_ADAPTER: Options = (("lora", True), ("seed", 1), ("micro_batches", 3))

SETUPS_OF_ALL = (
    "two_threads", "without_mkldnn", "fused_norms", "exact_sums", "sums_backwards", "two_ranks",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingVariant:
    """A candidate that is correct.

    way: how it differs from the noise run; device: where it runs.
    mesh: ranks by axis; features: of the plan; options: those of `TrainOptions` not as by default.
    known: why it fails although it is correct; empty for all that have to pass.
    """

    model: str
    dtype: str
    way: str
    device: str = "cpu"
    setup: str | None = None
    trainer: str | None = None
    mesh: Mesh = ()
    features: tuple[str, ...] = ()
    options: Options = AS_BY_DEFAULT
    known: str = ""

    @property
    def name(self) -> str:
        """Unique among the variants."""
        options = "".join(f", {name} {value}" for name, value in self.options)
        return f"{self.model} {self.device}/{self.dtype}: {self.way}{options}"

    @property
    def golden(self) -> str:
        """The same for all that share a golden."""
        return f"{self.dtype} {self.train_options.model_dump_json()}"

    @property
    def train_options(self) -> TrainOptions:
        """What its golden is recorded with, as `assay check train` does for such a candidate."""
        options = TrainOptions(model=self.model, **dict[str, Any](self.options))
        return options_for(options, dict(self.mesh), self.features, options.shapes)

    @property
    def on_ranks(self) -> bool:
        """Whether it trains in several processes."""
        return bool(self.mesh)


def training_variants() -> Iterator[TrainingVariant]:
    """All of them."""
    for dtype in DTYPES:
        for model in DECODERS:
            yield from _one_process(model, dtype)
            yield from _other_steps(model, dtype)
            yield from _adapters(model, dtype)
            yield from _random_weights(model, dtype)
            yield from _two_ranks(model, dtype)
            yield from _features(model, dtype)
        for model in DIVIDED:
            yield _on_ranks(model, dtype, "tensor-parallel", (("tp", 2),))
            yield _on_ranks(model, dtype, "pipeline", (("pp", 2),), options=IN_STAGES)
        yield from _by_conventions_of_libraries(dtype)
        yield from _ranks_of_llama(dtype)
    for model in DECODERS:
        yield from _in_float16(model)


def _one_process(model: str, dtype: str) -> Iterator[TrainingVariant]:
    yield TrainingVariant(model, dtype, "as it comes")
    yield _recomputed(model, dtype, "cpu")
    yield _recomputed(model, dtype, "sim:split2")
    for device in ("sim:split4", "sim:split2", "sim:truncate"):
        yield _simulated(model, dtype, device)
    for function in SETUPS_OF_ALL:
        yield _set_up(model, dtype, function)
    if model not in EAGER_ONLY:
        yield _set_up(model, dtype, "eager_attention")
        yield _set_up(model, dtype, "attention_in_parts")
    if model in WITH_EXPERTS:
        yield _set_up(model, dtype, "eager_experts")
        yield _set_up(model, dtype, "batched_experts")
    else:
        yield _set_up(model, dtype, "fused_gate_and_up")
    for name in (
        "FusedOptimizer", "OptimizerOneByOne", "LossOfTheModel", "LossBesideTheModels",
        "LossRowByRow", "ExactClipping", "ClippingByOneVector", "PositionsGiven",
    ):  # fmt: skip
        trainer = f"{TRAINERS}:{name}"
        yield TrainingVariant(model, dtype, _words(name), trainer=trainer)

    if dtype != "float32" and model in MIXED:
        yield _asked_for(model, dtype, "mixed-precision")
        rounds = f"{TRAINERS}:RoundsStochastically"
        yield TrainingVariant(model, dtype, "rounds stochastically", trainer=rounds)


def _other_steps(model: str, dtype: str) -> Iterator[TrainingVariant]:
    for options in OTHER_STEPS:
        for device in ("sim", "sim:split2", "sim:truncate"):
            yield _simulated(model, dtype, device, options)
        yield _set_up(model, dtype, "sums_backwards", options)


def _adapters(model: str, dtype: str) -> Iterator[TrainingVariant]:
    yield TrainingVariant(model, dtype, "adapter", options=ADAPTER)
    yield _recomputed(model, dtype, "cpu", ADAPTER)
    yield TrainingVariant(model, dtype, "adapter", "sim:split4", options=ADAPTER)
    yield TrainingVariant(model, dtype, "adapter", "sim:split2", options=OTHER_ADAPTER)
    yield _set_up(model, dtype, "exact_sums", OTHER_ADAPTER)


def _random_weights(model: str, dtype: str) -> Iterator[TrainingVariant]:
    for seed in (1, 2):
        random = f"{model}?trained=0&seed={seed}"
        yield TrainingVariant(random, dtype, "random weights", "sim:split2")
        yield _set_up(random, dtype, "sums_backwards")


def _features(model: str, dtype: str) -> Iterator[TrainingVariant]:
    """Features of a plan, alone and together."""
    yield _asked_for(model, dtype, "packed")
    yield _asked_for(model, dtype, "packed", options=FOUR_MICRO_BATCHES)
    yield _asked_for(model, dtype, "packed", "recompute", options=ADAPTER)
    yield _asked_for(model, dtype, "loss-scaling")
    yield _asked_for(model, dtype, "compile")
    if model == "micro:llama":
        yield _asked_for(model, dtype, "compile", "recompute", options=ADAPTER)
        for trainer in RANK_TRAINERS:
            yield _on_ranks(model, dtype, trainer, features=("packed",), options=FOUR_MICRO_BATCHES)
            yield _on_ranks(model, dtype, trainer, features=("loss-scaling",))
            yield _on_ranks(model, dtype, trainer, features=("compile", "recompute"))


def _in_float16(model: str) -> Iterator[TrainingVariant]:
    """AdamW works in float32 around it alone."""
    for others in ((), ("loss-scaling",), ("loss-scaling", "packed")):
        yield _asked_for(model, "float16", "mixed-precision", *others)
    if model == "micro:llama":
        scaled = ("mixed-precision", "loss-scaling")
        yield _asked_for(model, "float16", *scaled, options=ADAPTER)
        for trainer in RANK_TRAINERS:
            yield _on_ranks(model, "float16", trainer, features=scaled)
        yield _on_ranks(model, "float16", "fsdp", features=("mixed-precision",))


def _two_ranks(model: str, dtype: str) -> Iterator[TrainingVariant]:
    for trainer in RANK_TRAINERS:
        yield _on_ranks(model, dtype, trainer)
    if dtype != "float32":
        yield _on_ranks(model, dtype, "fsdp", features=("mixed-precision",))


def _by_conventions_of_libraries(dtype: str) -> Iterator[TrainingVariant]:
    model = "micro:llama"
    for name in ("Accelerated", "HuggingFace", "Concatenated"):
        trainer = f"{LIBRARIES}:{name}"
        yield TrainingVariant(model, dtype, _words(name), trainer=trainer)
    overflows = f"{LIBRARIES}:OverflowsAtFirst"
    yield TrainingVariant(
        model, dtype, "overflows at first", trainer=overflows, features=("loss-scaling",)
    )
    averaging = f"{LIBRARIES}:AveragingDDP"
    yield TrainingVariant(model, dtype, "averaging ranks", trainer=averaging, mesh=(("dp", 2),))


def _ranks_of_llama(dtype: str) -> Iterator[TrainingVariant]:
    model, four = "micro:llama", FOUR_MICRO_BATCHES
    for trainer in RANK_TRAINERS:
        yield _on_ranks(model, dtype, trainer, features=("recompute",))
        yield _on_ranks(model, dtype, trainer, options=ADAPTER)
        yield _on_ranks(model, dtype, trainer, device="sim:split2")
        yield _on_ranks(model, dtype, trainer, options=four)
        yield _on_ranks(model, dtype, trainer, (("dp", 4),), options=four)
        yield _on_ranks(model, dtype, trainer, (("dp", 4),), options=LONGER)
    yield _on_ranks(model, dtype, "fsdp", features=("cpu-offload",))
    yield _on_ranks(model, dtype, "fsdp", features=("cpu-offload", "recompute"))
    for mesh in ((("tp", 4),), (("dp", 2), ("tp", 2))):
        yield _on_ranks(model, dtype, "tensor-parallel", mesh)
        yield _on_ranks(model, dtype, "tensor-parallel", mesh, options=LONGER)
    yield _on_ranks(model, dtype, "tensor-parallel", (("tp", 2),), device="sim:split2")
    for mesh in ((("pp", 4),), (("tp", 2), ("pp", 2)), (("dp", 2), ("pp", 2))):
        yield _on_ranks(model, dtype, "pipeline", mesh, options=IN_STAGES)
    yield _on_ranks(model, dtype, "pipeline", (("pp", 2),), options=ADAPTER_IN_STAGES)


def _on_ranks(
    model: str,
    dtype: str,
    trainer: str,
    mesh: Mesh = (("dp", 2),),
    *,
    device: str = "cpu",
    features: tuple[str, ...] = (),
    options: Options = AS_BY_DEFAULT,
) -> TrainingVariant:
    ranks = ", ".join(f"{axis}={size}" for axis, size in mesh)
    way = ", ".join((f"{trainer} on ranks {ranks}", *features))
    return TrainingVariant(
        model, dtype, way, device, None, trainer, mesh, features, options
    )  # fmt: skip


def _asked_for(
    model: str, dtype: str, *features: str, options: Options = AS_BY_DEFAULT
) -> TrainingVariant:
    way = ", ".join(features)
    return TrainingVariant(model, dtype, way, features=features, options=options)


def _recomputed(
    model: str, dtype: str, device: str, options: Options = AS_BY_DEFAULT
) -> TrainingVariant:
    return TrainingVariant(
        model, dtype, "recompute", device, features=("recompute",), options=options
    )


def _simulated(
    model: str, dtype: str, device: str, options: Options = AS_BY_DEFAULT
) -> TrainingVariant:
    return TrainingVariant(model, dtype, "simulated", device, options=options)


def _set_up(
    model: str, dtype: str, function: str, options: Options = AS_BY_DEFAULT
) -> TrainingVariant:
    return TrainingVariant(
        model,
        dtype,
        function.replace("_", " "),
        setup=f"{SETUPS}:{function}",
        options=options,
    )


def _words(name: str) -> str:
    """`LossRowByRow` as `loss row by row`."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
