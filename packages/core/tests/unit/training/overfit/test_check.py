"""What is written for TensorBoard and Weights & Biases, read back by their own readers."""

import importlib
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.training.overfit.check import require_tracker, track
from assay.training.reports import LossCurve

CURVES = {
    "candidate": LossCurve(losses=[2.5, 1.25, 0.5], grad_norms=[4.0, 2.0, 1.0]),
    "exact-reference": LossCurve(losses=[2.5, 1.0, 0.25], grad_norms=[4.0, 3.0, 2.0]),
}
FACTS = {"model": "micro:llama"}

# What of the interface of wandb is used, kept in a file instead of sent.
FAKE = """
import json, os
from pathlib import Path

class Settings:
    def __init__(self, silent, console):
        assert silent and console == "off"

class Run:
    def __init__(self, folder):
        self.path = Path(folder) / "wandb" / "log.jsonl"
        self.path.parent.mkdir()
        self.file = self.path.open("w")
    def log(self, values, step):
        print(json.dumps([step, values]), file=self.file)
    def finish(self):
        self.file.close()

def init(project, name, dir, mode, config, settings):
    run = Run(dir)
    run.log([project, name, mode, config], -1)
    return run

def teardown():
    pass
"""


def test_tensorboard_reads_the_curves_of_every_side(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    folder = track("tensorboard", CURVES, tmp_path, FACTS)

    assert sorted(path.name for path in folder.iterdir()) == ["candidate", "exact-reference"]
    for side, curve in CURVES.items():
        events = reader.EventAccumulator(str(folder / side))
        events.Reload()
        losses = [(event.step, event.value) for event in events.Scalars("loss")]
        assert losses == list(enumerate(curve.losses))
        assert [event.value for event in events.Scalars("grad_norm")] == curve.grad_norms


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "packages"
    source.mkdir()
    (source / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)


@pytest.mark.usefixtures("fake_wandb")
@pytest.mark.parametrize(("asked", "mode"), [(None, "offline"), ("disabled", "disabled")])
def test_weights_and_biases_gets_every_step_offline_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, mode: str
) -> None:
    if asked:
        monkeypatch.setenv("WANDB_MODE", asked)
    require_tracker("wandb")
    folder = tmp_path / "my-run"
    folder.mkdir()

    where = track("wandb", CURVES, folder, FACTS)

    lines = (where / "log.jsonl").read_text().splitlines()
    assert lines[0] == f'[-1, ["assay", "my-run", "{mode}", {{"model": "micro:llama"}}]]'
    assert lines[2] == (
        '[1, {"loss/candidate": 1.25, "grad_norm/candidate": 2.0, "loss/exact-reference": 1.0,'
        ' "grad_norm/exact-reference": 3.0}]'
    )
    assert len(lines) == 4
    sys.modules.pop("wandb")


def test_weights_and_biases_itself_leaves_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed: its 62 MB are not part of the test environment")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))

    folder = track("wandb", CURVES, tmp_path, FACTS)

    (run,) = folder.glob("offline-run-*")
    (record,) = run.glob("run-*.wandb")
    assert read_history(record) == [
        {"loss/candidate": "2.5", "grad_norm/candidate": "4", "loss/exact-reference": "2.5",
         "grad_norm/exact-reference": "4", "_step": "0"},
        {"loss/candidate": "1.25", "grad_norm/candidate": "2", "loss/exact-reference": "1",
         "grad_norm/exact-reference": "3", "_step": "1"},
        {"loss/candidate": "0.5", "grad_norm/candidate": "1", "loss/exact-reference": "0.25",
         "grad_norm/exact-reference": "2", "_step": "2"},
    ]  # fmt: skip


def read_history(path: Path) -> list[dict[str, str]]:
    """What a log in LevelDB's format holds: 7 bytes of wandb's, then records of up to a block."""
    schema = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, steps = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        assert kind == 1, "a record of several parts: the test has written too much"
        record = schema.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        values = {"/".join(item.nested_key): item.value_json for item in record.history.item}
        for clock in ("_timestamp", "_runtime"):
            values.pop(clock, None)
        if values:
            steps.append(values)
    return steps


def test_unknown_tracker_is_refused() -> None:
    with pytest.raises(UsageError, match="--track excel: there are tensorboard, wandb"):
        require_tracker("excel")


def test_absent_package_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What Weights & Biases leaves where it ran looks like a package without a file.
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    with pytest.raises(UsageError, match=r"pip install 'assay-core\[wandb\]'"):
        require_tracker("wandb")
