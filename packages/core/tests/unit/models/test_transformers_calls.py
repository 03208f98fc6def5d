"""Models written as folders: on every rank, and without libraries that nobody asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers.distributed import mixin

from assay.models import load_model
from assay.models.transformers_calls import save_pretrained


def test_every_rank_writes_the_folder_that_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("micro:llama", dtype="bfloat16").model
    monkeypatch.setattr(mixin, "_is_torch_distributed_initialized", lambda: True)
    monkeypatch.setattr(mixin, "_get_torch_distributed_rank", lambda: 1)

    save_pretrained(model, tmp_path)

    assert {"config.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}


def test_untrained_model_is_written_without_importing_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    metadata = tmp_path / "deepspeed-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: deepspeed\nVersion: 9\n", encoding="utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from assay.models import load_model\n"
        "load_model('micro:llama?trained=0', dtype='float32')\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
