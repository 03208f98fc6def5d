from pathlib import Path

import pytest
import torch

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.estimates.limits import allowed_memory
from assay.estimates.trial_call import TrialCall
from assay.generate.processes.golden import capture_golden
from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.requests import GoldenManifest, GoldenRequest, InputOptions
from assay.generate.processes.run_plan import (
    Needs,
    choose_widening,
    estimate_needs,
    widening_within,
)
from assay.hooks import widening
from assay.models.loading.loaded_model import load_outline
from assay.runs import SilentProgress
from assay.trace import Trace

GOLDEN = GoldenRequest(
    model="micro:llama?trained=0",
    reference=parse_run("cpu/float32"),
    noise_for=["bfloat16"],
    inputs=InputOptions(max_new_tokens=4),
    folder="",
)


@pytest.fixture
def few_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let micro models have weights that are widened on use."""
    monkeypatch.setattr(widening, "SMALL_ELEMENTS", 1000)


def needs_of(request: GoldenRequest) -> Needs:
    outline = load_outline(request.model)
    plan = plan_inputs(request.inputs, outline)
    num_values = TrialCall.of(outline.model).num_values
    return estimate_needs(request, outline, plan, "float64", num_values)


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
    update = {"model": model, "level": level, "folder": str(tmp_path / "golden")}
    request = GOLDEN.model_copy(update=update)
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
    needs = needs_of(GOLDEN)
    counts = [
        sum(p.numel() for p in m.parameters(recurse=False) if p.numel() > 1000)
        for m in outline.model.modules()
    ]

    assert needs.memory - needs.memory_on_use == (8 - 2) * sum(counts) - 8 * max(counts) > 0


def test_small_weights_need_no_less_memory_on_use() -> None:
    assert needs_of(GOLDEN).memory_on_use == needs_of(GOLDEN).memory


@pytest.mark.parametrize(("dtype", "widening"), [("float64", "on use"), ("float32", "at once")])
def test_one_call_widens_on_use_what_does_not_fit(dtype: str, widening: str) -> None:
    assert widening_within(1_000_000_000, dtype, 8 * 10**9) == widening


@pytest.mark.usefixtures("few_small_weights")
def test_golden_of_weights_that_are_widened_on_use_is_the_same(tmp_path: Path) -> None:
    needs = needs_of(GOLDEN)

    def capture(name: str, max_memory: int) -> GoldenManifest:
        update = {"folder": str(tmp_path / name), "max_memory": max_memory}
        return capture_golden(GOLDEN.model_copy(update=update), SilentProgress())

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
    request = GOLDEN.model_copy(update={"folder": str(tmp_path / "golden"), "max_disk": 10**12})

    with pytest.raises(MachineError, match="--disk: time, memory and disk cannot be estimated"):
        capture_golden(request, SilentProgress())
    assert not (tmp_path / "golden").exists()


def test_refused_golden_loads_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    request = GOLDEN.model_copy(update={"folder": str(folder), "max_disk": 1000})

    with pytest.raises(MachineError, match=r"--disk allows 1\.0 kB"):
        capture_golden(request, SilentProgress())
    assert not folder.exists()
