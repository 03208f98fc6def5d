"""How a check fits into its budget, the memory and the disk."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.estimates import Speed, TrialCall, allowed_memory
from assay.generate.capture import capture_golden
from assay.generate.golden import GoldenManifest
from assay.generate.run_plan import (
    BASE_BYTES,
    Needs,
    _Estimator,
    choose_widening,
    estimate_needs,
    plan_inputs,
    plan_run,
    widening_within,
)
from assay.generate.spec import GoldenSpec, InputOptions
from assay.hooks import widening
from assay.models import load_model
from assay.models.load import load_outline
from assay.runs import SilentProgress
from assay.trace import Trace


@pytest.mark.parametrize(
    ("begin", "noted"),
    [([256, 256], ["two BOS tokens (id 256) at the beginning of prompt 1"]), ([256], [])],
)
def test_prompt_that_begins_twice_is_noted(
    tmp_path: Path, begin: list[int], noted: list[str]
) -> None:
    rows = [[256, 97, 98], [*begin, 97, 98]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))

    plan = plan_inputs(
        InputOptions(prompts=str(file), max_new_tokens=1),
        load_model("micro:llama", dtype="float32"),
    )
    assert [note for note in plan.notes if "BOS" in note] == noted


@pytest.mark.parametrize(
    ("length", "tried"),
    [
        (None, False),
        ("8", " (a check without --prompt-length tries what the model's context allows)"),
    ],
)
def test_untried_input_says_which_option_leaves_it_out(length: str | None, tried: object) -> None:
    model = load_model("micro:llama", dtype="float32")
    plan = plan_inputs(InputOptions(prompt_length=length, max_new_tokens=2), model)
    missed = [note for note in plan.notes if "do not try" in note]
    assert [note.partition("chunked prefill")[2] for note in missed] == [tried] * bool(tried)


SPEC = GoldenSpec(
    model="micro:llama?trained=0",
    reference=parse_run("cpu/float32"),
    noise_for=["bfloat16"],
    inputs=InputOptions(max_new_tokens=32),
    folder=Path(),
)
SHORT = replace(SPEC, inputs=InputOptions(max_new_tokens=4))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A machine on which a decode step takes the time; the probed dtypes, and those of the weights."""
    probes: list[tuple[str, str | None]] = []

    def probe(_: object, dtype: str, stored: str | None = None) -> Speed:
        probes.append((dtype, stored))
        return Speed(1e-7, 0.0)

    monkeypatch.setattr(Speed, "probe", probe)
    monkeypatch.setattr(TrialCall, "of", lambda model: TrialCall(1e4, 1e7, 0))
    return probes


def seconds_of(num_tokens: int) -> float:
    estimator = _Estimator(SPEC, open_run(SPEC.reference), "float64")
    return estimator.of(InputOptions(max_new_tokens=num_tokens)).seconds


def tokens_within(budget: float | None, wanted: int = 32) -> int:
    inputs = InputOptions(max_new_tokens=wanted)
    request = replace(SPEC, max_seconds=budget, inputs=inputs)
    run = plan_run(request, open_run(request.reference), "float64", SilentProgress())
    return run.inputs.max_new_tokens


@pytest.mark.usefixtures("probed")
def test_tokens_are_halved_until_both_sides_fit() -> None:
    assert seconds_of(32) > 1.5 * seconds_of(16) > 2 * seconds_of(8)

    assert tokens_within(None) == 32
    assert tokens_within(seconds_of(32)) == 32
    assert tokens_within(0.99 * seconds_of(32)) == 16
    assert tokens_within(seconds_of(8)) == 8
    assert tokens_within(seconds_of(2), wanted=3) == 2


@pytest.mark.usefixtures("probed")
def test_shorter_run_is_noted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, notes = seconds_of(8), []
    monkeypatch.setattr(SilentProgress, "note", lambda _, text: notes.append(text))

    tokens_within(budget)

    assert notes[0] == "--budget: each prompt gets 8 new tokens instead of 32"


@pytest.mark.usefixtures("probed")
def test_budget_that_no_decode_step_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        MachineError, match=r"check of 2 new tokens takes about \d+ s, but --budget allows 2 s"
    ):
        tokens_within(2.0)


def test_weights_that_are_widened_on_use_are_probed_so(
    probed: list[tuple[str, str | None]],
) -> None:
    seconds_of(4)
    assert probed == [("float64", None), ("bfloat16", None), ("bfloat16", None)]
    probed.clear()

    request = replace(SPEC, max_memory=BASE_BYTES)
    with pytest.raises(MachineError, match="needs about"):
        plan_run(request, open_run(SPEC.reference), "float64", SilentProgress())

    assert probed[0] == ("float64", "bfloat16")


@pytest.mark.usefixtures("probed")
def test_golden_within_a_budget_says_what_is_given_up(tmp_path: Path) -> None:
    update: dict[str, Any] = {"folder": tmp_path / "golden", "max_seconds": seconds_of(4)}
    manifest = capture_golden(replace(SPEC, **update), SilentProgress())

    assert manifest.inputs.max_new_tokens == 4
    assert "--budget: the last 28 of 32 new tokens of each prompt are not checked" in manifest.notes


@pytest.fixture
def few_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let micro models have weights that are widened on use."""
    monkeypatch.setattr(widening, "SMALL_ELEMENTS", 1000)


def needs_of(request: GoldenSpec) -> Needs:
    outline = load_outline(request.model)
    plan = plan_inputs(request.inputs, outline)
    return estimate_needs(request, outline, plan, "float64", TrialCall.of(outline.model))


NEEDS = Needs(memory=2 * 10**9, memory_on_use=10**9, disk=3 * 10**9)


def test_outline_has_the_shapes_of_the_model_and_no_values() -> None:
    outline = load_outline("micro:llama")

    assert all(parameter.is_meta for parameter in outline.model.parameters())
    assert outline.vocab_size == 260
    assert outline.encode("ab") == [256, 97, 98]


@pytest.mark.parametrize(
    ("model", "level", "factor"),
    [
        ("micro:llama", "module", 1.5),
        ("micro:mixtral", "module", 1.5),
        ("micro:gemma2", "module", 1.5),
        ("micro:bert", "module", 1.5),
        ("micro:llama", "logits", 1.05),
    ],
)
def test_estimated_disk_is_that_of_the_golden(
    model: str, level: str, factor: float, tmp_path: Path
) -> None:
    update: dict[str, Any] = {"model": model, "level": level, "folder": tmp_path / "golden"}
    request = replace(SHORT, **update)
    needs = needs_of(request)
    capture_golden(request, SilentProgress())

    files = (tmp_path / "golden").rglob("*.safetensors")
    written = sum(path.stat().st_size for path in files)
    assert bool(Trace.open(tmp_path / "golden" / "bfloat16").calls) is (level == "module")
    assert written / factor < needs.disk < written * factor


def test_model_beyond_the_allowed_memory_is_refused_with_the_numbers() -> None:
    device = open_run(parse_run("cpu/float32"))
    free = allowed_memory(device, None)
    assert free > 0
    assert allowed_memory(device, 10**6) == 10**6

    with pytest.raises(MachineError, match=r"needs about 1\.0 GB of memory, .* Only 500\.0 MB"):
        choose_widening(NEEDS, 5 * 10**8)
    assert choose_widening(NEEDS, 15 * 10**8) == "on use"
    assert choose_widening(NEEDS, 2 * 10**9) == "at once"


@pytest.mark.usefixtures("few_small_weights")
def test_estimated_memory_is_that_of_all_weights_or_of_one_module() -> None:
    outline = load_outline("micro:llama")
    needs = needs_of(SHORT)
    counts = [
        sum(p.numel() for p in m.parameters(recurse=False) if p.numel() > 1000)
        for m in outline.model.modules()
    ]

    assert needs.memory - needs.memory_on_use == (8 - 2) * sum(counts) - 8 * max(counts) > 0


def test_small_weights_need_no_less_memory_on_use() -> None:
    assert needs_of(SHORT).memory_on_use == needs_of(SHORT).memory


@pytest.mark.parametrize(("dtype", "widening"), [("float64", "on use"), ("float32", "at once")])
def test_one_call_widens_on_use_what_does_not_fit(dtype: str, widening: str) -> None:
    assert widening_within(1_000_000_000, dtype, 8 * 10**9) == widening


@pytest.mark.usefixtures("few_small_weights")
def test_golden_of_weights_that_are_widened_on_use_is_the_same(tmp_path: Path) -> None:
    needs = needs_of(SHORT)

    def capture(name: str, max_memory: int) -> GoldenManifest:
        update: dict[str, Any] = {"folder": tmp_path / name, "max_memory": max_memory}
        return capture_golden(replace(SHORT, **update), SilentProgress())

    whole, on_use = capture("whole", needs.memory), capture("on-use", needs.memory_on_use)

    assert any("one module at a time" in note for note in on_use.notes)
    assert not any("one module at a time" in note for note in whole.notes)
    traces = [Trace.open(tmp_path / name / "bfloat16") for name in ("whole", "on-use")]
    tensors = [
        [trace.tensor(call, port) for call in trace.calls for port in call.ports]
        for trace in traces
    ]
    assert len(tensors[0]) > 100
    assert all(map(torch.equal, *tensors))


def test_limit_that_cannot_be_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_values(*_: object) -> TrialCall:
        raise RuntimeError("no values on meta")

    monkeypatch.setattr(TrialCall, "of", needs_values)
    request = replace(SHORT, folder=tmp_path / "golden", max_disk=10**12)

    with pytest.raises(MachineError, match="--disk: time, memory and disk cannot be estimated"):
        capture_golden(request, SilentProgress())
    assert not (tmp_path / "golden").exists()


def test_refused_golden_loads_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    request = replace(SHORT, folder=folder, max_disk=1000)

    with pytest.raises(MachineError, match=r"--disk allows 1\.0 kB"):
        capture_golden(request, SilentProgress())
    assert not folder.exists()
