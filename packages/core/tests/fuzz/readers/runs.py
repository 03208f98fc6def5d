"""Readers of what core writes: verdicts, measurements, goldens, traces, states, adapters."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import save_file

from assay.devices.run_string import parse_run
from assay.files import read_json_object
from assay.generate.check import capture
from assay.generate.golden import GoldenSection, verify_golden
from assay.generate.spec import GoldenSpec, InputOptions
from assay.output.console import open_text_console
from assay.report.page.html import render_html
from assay.report.run_report import Report, read_report
from assay.report.text_formats import print_report, render_markdown
from assay.runs import SilentProgress
from assay.runs.folders import MARK, RunFolder
from assay.runs.results import VERDICT_FILE
from assay.sites import Call, CallSite
from assay.trace import Trace, TraceWriter
from assay.training.state.files import fingerprint, read_state, write_state
from assay.training.trainers.adapters import ADAPTER_FILE, other_adapter_settings, read_adapter
from packages.core.tests.fuzz.reader import NotedError, Reader
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

_SMALL = Sample(num_layers=1, num_prompts=2, prompt_length=16, num_new_tokens=2,
                faulty_module="model.layers.0.mlp.down_proj")  # fmt: skip
_DTYPE = "float32"


def _write_run(folder: Path) -> None:
    write_sample(folder, _SMALL)


def _write_unsealed_run(folder: Path) -> None:
    write_sample(folder, _SMALL)
    content = read_json_object(folder / VERDICT_FILE)
    del content["digest"]
    content["files"] = {}
    (folder / VERDICT_FILE).write_text(json.dumps(content))


def _report(folder: Path) -> Report:
    """Draw a report in every format."""
    report = read_report(folder)
    with (folder / "terminal.txt").open("w") as file:
        print_report(report, open_text_console(file), folder / "page.html")
    render_markdown(report)
    render_html(report)
    return report


def _read_run(folder: Path) -> object:
    report = _report(folder)
    if report.complaints or any("no digest" in note for note in report.verdict.notes):
        raise NotedError(str(report.complaints or report.verdict.notes))
    return report.verdict.to_json(), report.measurements


def _write_trace(folder: Path) -> None:
    with TraceWriter(folder, {"model": "micro:llama"}) as writer:
        for step in (0, 1):
            call = Call(CallSite(step, "a"), order=2 * step, class_name="Linear", caller=None)
            writer.add(call, {"output": torch.arange(8.0) + step})
            writer.flush()
        writer.attach("noise", {"a": torch.tensor([1.0, 2.0])})
        writer.attach_json("tokens", [[1, 2], [3]])


def _read_trace(folder: Path) -> object:
    trace = Trace.open(folder)
    damage = trace.find_damage()
    noise = trace.attachment("noise")["a"]
    values = [trace.tensor(trace.calls[0], "output").tolist(), noise.tolist()]
    content = (trace.manifest, trace.calls, values, trace.attachment_json("tokens"))
    if damage or not trace.complete:
        raise NotedError("\n".join(damage) or "not complete")
    return content


def _write_golden(folder: Path) -> None:
    spec = GoldenSpec(
        model="micro:llama",
        reference=parse_run("cpu/float32"),
        noise_for=[_DTYPE],
        inputs=InputOptions(max_new_tokens=2, batch_size=2, prompt_length="4"),
        folder=folder / "golden",
    )
    (folder / "golden").mkdir()
    capture(spec, folder, SilentProgress())
    for other in folder.iterdir():
        if other.is_file():
            other.unlink()


def _read_golden(folder: Path) -> object:
    verify_golden(folder / "golden", _DTYPE)
    return _use_golden(folder)


def _use_golden(folder: Path) -> object:
    """Use a golden that nothing has compared with its hashes."""
    section = GoldenSection.open(folder / "golden", _DTYPE)
    names = ("tokens", "logits", "noise-logits")
    values = [[one.tolist() for one in section.tensors(name)] for name in names]
    return (values, section.noise(), section.pointwise(), section.score_noise(), section.load(),
            section.usage(), section.weights())  # fmt: skip


def _write_state(folder: Path) -> None:
    state = {"a": torch.arange(4.0), "b": [1, (2, torch.ones(2))], "c": {1: None, "d": 1.5}}
    write_state(folder / "state", state)


def _write_adapter(folder: Path) -> None:
    save_file({"base.lora_A": torch.ones(2, 4)}, folder / ADAPTER_FILE)
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q"],
        "bias": "none",
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _read_adapter(folder: Path) -> object:
    own = {
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "modules_to_save": None,
        "target_modules": {"q"},
    }
    config = SimpleNamespace(to_dict=lambda: own, target_modules={"q"})
    model = SimpleNamespace(peft_config={"default": config})
    return read_adapter(folder), other_adapter_settings(cast("Any", model), folder)


def _write_mark(folder: Path) -> None:
    RunFolder.create("bench run", folder)


READERS = (
    Reader("verdict", _write_run, _read_run, sealed=True),
    Reader("verdict-without-digest", _write_unsealed_run, _report, mutated=(VERDICT_FILE,)),
    Reader("measurements-without-digest", _write_unsealed_run, _report, mutated=("*.jsonl",)),
    Reader("trace", _write_trace, _read_trace, sealed=True),
    Reader("golden", _write_golden, _read_golden, sealed=True, slow=True),
    Reader("golden-unverified", _write_golden, _use_golden, slow=True),
    Reader("state", _write_state, lambda folder: fingerprint(read_state(folder / "state")), sealed=True),
    Reader("adapter", _write_adapter, _read_adapter),
    Reader("run-mark", _write_mark, lambda folder: str(RunFolder.resume("bench run", folder).path),
           mutated=(MARK,)),
)  # fmt: skip
