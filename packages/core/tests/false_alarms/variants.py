"""Correct ways to run correct models, each against a golden of its own model, dtype and inputs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from assay.generate.spec import InputOptions
from packages.core.tests.false_alarms.architectures import (
    OTHERS,
    ROUTED,
    WRONG_WITH_PADDING,
    name_of,
)

SETUPS = Path(__file__).parent / "setups.py"
DTYPES = ("float32", "float16", "bfloat16")
DECODERS = ("llama", "mistral", "gemma2", "mixtral")
EAGER_ONLY = ("gemma2",)  # sdpa has no soft caps

BIASED = "truncation shrinks the products, and not the biases that are added to them"

# The folder of a model that a test makes: a window that no text reaches.
WIDE_WINDOW = "mistral-with-a-window-of-4096"


@dataclass(frozen=True)
class Variant:
    """A candidate that is correct.

    way: how it differs from the noise run; device: where it runs.
    known: why it fails although it is correct; empty for all that have to pass.
    """

    model: str
    dtype: str
    way: str
    device: str = "cpu"
    setup: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[tuple[str, object], ...] = ()
    known: str = ""

    @property
    def name(self) -> str:
        """Unique among the variants."""
        inputs = "".join(f", {name} {value}" for name, value in self.inputs)
        return f"{self.model} {self.device}/{self.dtype}: {self.way}{inputs}"

    @property
    def input_options(self) -> InputOptions:
        """What its golden is captured with."""
        return InputOptions.model_validate(dict(self.inputs))


def variants() -> Iterator[Variant]:
    """All of them."""
    for dtype in DTYPES:
        for recipe in DECODERS:
            yield from _of_recipe(f"micro:{recipe}", dtype)
            if recipe not in EAGER_ONLY:
                yield from _of_attention(f"micro:{recipe}", dtype)
        yield from _of_single_recipes(dtype)
        yield from _on_other_inputs(dtype)
    for dtype in ("float32", "bfloat16"):
        yield Variant("micro:llama", dtype, "compiled", options={"compile": "1"})
        yield _set_up("micro:llama", dtype, "compiled_layers")
        yield from _of_architectures(dtype)


def _of_architectures(dtype: str) -> Iterator[Variant]:
    inputs = (("prompt_length", "16:32"), ("max_new_tokens", 8))
    for model_type in ROUTED:
        for seed in (0, 1, 2):
            model = name_of(model_type, seed)
            yield Variant(model, dtype, "another architecture", inputs=inputs)
    for model_type in OTHERS:
        batches = (("batch_size", 1),) if model_type in WRONG_WITH_PADDING else ()
        model = name_of(model_type, 0)
        yield Variant(model, dtype, "another architecture", inputs=(*inputs, *batches))


def _of_recipe(model: str, dtype: str) -> Iterator[Variant]:
    yield Variant(model, dtype, "as it comes")
    yield Variant(model, dtype, "each prompt alone", options={"batch-size": "1"})
    yield Variant(model, dtype, "two threads", options={"threads": "2"})
    for device in ("sim", "sim:split4", "sim:split2", "sim:truncate"):
        yield Variant(model, dtype, "simulated", device)
    if dtype == "float16":
        yield Variant(model, dtype, "simulated", "sim:fp16acc")
    for function in ("without_mkldnn", "fused_norms", "exact_sums", "two_ranks"):
        yield _set_up(model, dtype, function)


def _of_attention(model: str, dtype: str) -> Iterator[Variant]:
    yield Variant(model, dtype, "eager attention", options={"attention": "eager"})
    yield _set_up(model, dtype, "attention_in_parts")


def _of_single_recipes(dtype: str) -> Iterator[Variant]:
    for experts in ("eager", "batched_mm", "grouped_mm"):
        yield Variant("micro:mixtral", dtype, f"{experts} experts", options={"experts": experts})
    for function in ("sums_backwards", "fused_gate_and_up"):
        yield _set_up("micro:llama", dtype, function)
    for recipe in ("llama", "gemma2", "mixtral"):
        for seed in (1, 2):
            model = f"micro:{recipe}?trained=0&seed={seed}"
            yield Variant(model, dtype, "random weights", "sim:split4")
    for function in ("exact_sums", "biases_added_last"):
        yield _set_up("micro:bert", dtype, function)
    for device in ("cpu", "sim", "sim:split4", "sim:truncate"):
        # In float32 the second rounding is in float64.
        known = BIASED if device == "sim:truncate" and dtype != "float32" else ""
        yield Variant("micro:bert", dtype, "encoder", device, known=known)
    yield Variant(WIDE_WINDOW, dtype, "window longer than the text", "sim:split2")
    yield _set_up(WIDE_WINDOW, dtype, "window_of_8192")


def _on_other_inputs(dtype: str) -> Iterator[Variant]:
    for inputs in (
        (("seed", 1),),
        (("prompt_length", "64"),),  # of equal length: no padding
        (("prompt_length", "5:20"), ("batch_size", 8)),
        (("max_new_tokens", 4), ("batch_size", 1)),
    ):
        for recipe in ("llama", "gemma2"):
            yield Variant(f"micro:{recipe}", dtype, "other inputs", "sim:split4", inputs=inputs)


def _set_up(model: str, dtype: str, function: str) -> Variant:
    return Variant(model, dtype, function.replace("_", " "), setup=f"{SETUPS}:{function}")
