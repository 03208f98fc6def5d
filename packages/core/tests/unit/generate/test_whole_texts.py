from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from assay.devices.registry import open_device
from assay.generate.generation_loop import read_text
from assay.generate.passes import (
    RootInputs,
    Side,
    Work,
    attach_text_steps,
    find_contradictions,
    record,
    run_all_free,
    run_forced,
    run_free,
    whole_batches,
    with_whole_texts,
)
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.row_positions import RowIndex
from assay.hooks.tensors import Boundary
from assay.inputs import Batch
from assay.models import load_model
from assay.progress import SilentProgress
from assay.recording.modules import Recorder
from assay.replay.ports import BatchSource
from assay.replay.trace_views import StepwiseTrace
from assay.trace import Trace, TraceWriter

UNROUNDED = Boundary(torch.float64, torch.float64)
BATCH = Batch(0, ((5, 6, 7), (7, 8, 9, 10, 11)), (0, 1), 0, 3)
QUIET = SilentProgress()
FAMILIES = ("llama", "mixtral", "qwen3", "granite", "gpt-bigcode")


def side_of(name: str, dtype: str = "float64") -> Side:
    loaded = load_model(f"micro:{name}?trained=0", dtype=dtype, attention="eager")
    return Side(loaded, open_device("cpu"))


@pytest.fixture
def side() -> Side:
    return side_of("llama")


def record_text(side: Side, work: Work, folder: Path) -> tuple[Trace, Tensor]:
    """Generate freely and record the text as `work` asks. Returns: the trace and the tokens."""
    with TraceWriter(folder, {}) as writer:
        inputs = RootInputs(writer, [work])
        free_work = replace(work, text_step=None)
        (free,) = run_all_free(side, [free_work], {}, UsageWatch(inputs, root_only=True))
        watch = UsageWatch(Recorder(writer, UNROUNDED))
        record(side, [work], [free.tokens], watch, inputs.num_calls)
        attach_text_steps(writer, [work])
    return Trace.open(folder), free.tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_a_whole_text_are_those_that_were_recorded_step_by_step(
    name: str, tmp_path: Path
) -> None:
    side = side_of(name)
    by_step, _ = record_text(side, Work(BATCH, BatchSource(0)), tmp_path / "steps")
    whole, _ = record_text(side, Work(BATCH, BatchSource(0), text_step=3), tmp_path / "text")
    view = StepwiseTrace.open(whole)

    assert len(view.calls) == len(by_step.calls)
    assert len(whole.calls) < len(by_step.calls)
    num_compared = 0
    for call in by_step.calls:
        found = view.find(call.site)
        assert found is not None
        assert (found.rows, found.caller, set(found.ports)) == (
            call.rows, call.caller, set(call.ports),
        )  # fmt: skip
        for port in call.ports:
            expected, actual = by_step.tensor(call, port), view.tensor(found, port)
            assert view.stored(found, port).shape == tuple(actual.shape) == tuple(expected.shape)
            # Padding attends to other columns of padding.
            pair, _, _ = RowIndex(call.rows).flatten(actual, expected)
            torch.testing.assert_close(*pair, rtol=0, atol=1e-9)
            num_compared += 1
    assert num_compared > 100


def test_logits_of_a_whole_text_are_those_of_its_steps(side: Side) -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    by_step = run_forced(side, Work(BATCH, BatchSource(0)), tokens).logits
    whole = run_forced(side, Work(BATCH, BatchSource(0), text_step=3), tokens).logits

    torch.testing.assert_close(whole, by_step, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_decoders_are_recorded_in_whole_texts(name: str) -> None:
    (work,) = with_whole_texts(side_of(name), whole_batches([BATCH]), QUIET)

    assert work.text_step == 3


@pytest.mark.parametrize(("dtype", "factor"), [("float64", 1 + 1e-6), ("float32", 1 + 1e-4)])
def test_model_whose_steps_compute_something_else_is_recorded_step_by_step(
    dtype: str, factor: float
) -> None:
    def scale_single_tokens(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * factor if output.shape[1] == 1 else output

    side = side_of("llama", dtype)
    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(scale_single_tokens):
        (work,) = with_whole_texts(side, whole_batches([BATCH]), QUIET)

    assert work.text_step is None


def contradictions_of(side: Side, batch: Batch) -> list[str]:
    work = Work(batch, BatchSource(0))
    free = run_free(side, work, {})
    return find_contradictions(side, work, free.tokens, free.logits)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", [*FAMILIES, "mistral"])
def test_steps_of_a_correct_model_agree_with_one_call(
    name: str, dtype: str, chunk: int | None
) -> None:
    batch = BATCH if chunk is None else replace(BATCH.select_row(1), prefill_chunk=chunk)
    assert contradictions_of(side_of(name, dtype), batch) == []


@pytest.mark.parametrize(("chunk", "part"), [(None, "decode steps"), (2, "a prefill in chunks")])
def test_model_that_computes_something_else_step_by_step_contradicts_itself(
    side: Side, chunk: int | None, part: str
) -> None:
    """Zamba2 and Nemotron-H bound the time step in the prefill alone (transformers 5.23), to 5e-4 of the logits."""

    def scale_short_calls(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * 1.01 if output.shape[1] <= 2 else output

    batch = replace(BATCH.select_row(1), prompts=(7,), prefill_chunk=chunk)
    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(scale_short_calls):
        (note,) = contradictions_of(side, batch)

    first = 1 if chunk is None else 0
    assert note.startswith(f"the model's code contradicts itself: {part} and one call over")
    assert f"first at prompt 7, new token {first})" in note


@pytest.mark.parametrize(
    ("logit", "in_steps", "is_noted"),
    [(-torch.inf, -torch.inf, False), (torch.nan, torch.nan, False), (0.0, torch.nan, True)],
)
def test_logits_that_are_not_finite_agree_only_with_their_like(
    side: Side, logit: float, in_steps: float, *, is_noted: bool
) -> None:
    def replace_one(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., 3] = in_steps if output.shape[1] == 1 and is_noted else logit
        return output

    head = side.loaded.model.get_submodule("lm_head")
    with head.register_forward_hook(replace_one):
        assert bool(contradictions_of(side, BATCH)) is is_noted


def test_text_that_no_call_reads_is_noted(side: Side) -> None:
    def refuse_texts(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.shape[1] > 5:  # the longest prompt
            raise RuntimeError("no kernel")

    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(refuse_texts):
        assert contradictions_of(side, BATCH) == [
            "decode steps: not compared with one call over the same text: the model raised RuntimeError: no kernel"
        ]


def test_model_that_reads_padding_contradicts_itself(side: Side) -> None:
    """RWKV ignores the mask, and DeepSeek-V4's compressor pools padding (transformers 5.23, issue 45938)."""

    def add_first_column(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output + 0.1 * output[:, :1]

    batch = replace(BATCH, prompts=(3, 4))
    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(add_first_column):
        *_, note = contradictions_of(side, batch)

    assert note.startswith(
        "the model's code contradicts itself: the logits of a text change if its batch pads it (relative error"
    )
    assert "first at prompt 3, new token 0): it reads padding" in note


@pytest.mark.parametrize(
    ("setting", "value", "is_compared"),
    [
        ("index_topk", 7, False),
        ("index_topk", 8, True),  # as many keys as the text has
        ("rope_parameters", {"rope_type": "dynamic"}, False),
    ],
)
def test_model_is_not_compared_if_its_choices_or_positions_depend_on_the_length(
    side: Side, setting: str, value: object, monkeypatch: pytest.MonkeyPatch, *, is_compared: bool
) -> None:
    def scale_single_tokens(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output * 1.01 if output.shape[1] == 1 else output

    monkeypatch.setattr(side.loaded.config, setting, value, raising=False)
    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(scale_single_tokens):
        assert bool(contradictions_of(side, BATCH)) is is_compared


def test_all_logits_of_a_text_are_read_where_the_model_asks_for_one(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = side.loaded.model
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def ask_for_one(*arguments: object, **named: object) -> object:  # as Falcon-H1 and Zamba2 do
        return prepare(*arguments, **(named | {"logits_to_keep": 1}))

    monkeypatch.setattr(model, "prepare_inputs_for_generation", ask_for_one)
    assert read_text(side.loaded, BATCH, torch.tensor([[1, 2, 3], [4, 5, 6]])).shape[1] == 3


def test_trial_that_raises_is_noted(side: Side) -> None:
    def refuse_texts(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        # The prompts of the trial have at most 9 tokens.
        if output.shape[1] > 9:
            raise RuntimeError("no kernel")

    class Notes(SilentProgress):
        taken: ClassVar[list[str]] = []

        def note(self, text: str) -> None:
            self.taken.append(text)

    up = side.loaded.model.get_submodule("model.layers.1.mlp.up_proj")
    with up.register_forward_hook(refuse_texts):
        (work,) = with_whole_texts(side, whole_batches([BATCH]), Notes())

    assert work.text_step is None
    assert Notes.taken == [
        "each step is recorded; reading a text in one call: the model raised RuntimeError: no kernel"
    ]


@pytest.mark.parametrize(
    "batch",
    [replace(BATCH, prefill_chunk=2), replace(BATCH, max_new_tokens=1)],
    ids=["read in chunks", "one token"],
)
def test_texts_that_are_not_read_at_once_are_recorded_step_by_step(
    side: Side, batch: Batch
) -> None:
    (work,) = with_whole_texts(side, whole_batches([batch]), QUIET)

    assert work.text_step is None


def test_text_beyond_a_sliding_window_is_recorded_step_by_step() -> None:
    side = side_of("mistral")
    inside, beyond = with_whole_texts(
        side, whole_batches([BATCH, replace(BATCH, number=1, max_new_tokens=32)]), QUIET
    )

    assert (inside.text_step, beyond.text_step) == (3, None)


@pytest.mark.parametrize("name", FAMILIES)
def test_yardstick_in_float32_reads_a_text_in_one_call(name: str) -> None:
    (work,) = with_whole_texts(side_of(name, "float32"), whole_batches([BATCH]), QUIET)

    assert work.text_step == 3


def test_recurrent_model_is_recorded_step_by_step(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(side.loaded.model), "_is_stateful", True, raising=False)

    (work,) = with_whole_texts(side, whole_batches([BATCH]), QUIET)

    assert work.text_step is None


def test_encoder_is_recorded_as_it_runs() -> None:
    (work,) = with_whole_texts(
        side_of("bert"), whole_batches([replace(BATCH, max_new_tokens=0)]), QUIET
    )

    assert work.text_step is None
