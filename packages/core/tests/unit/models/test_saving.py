"""Models written as folders."""

from pathlib import Path

import pytest
from transformers.distributed import mixin

from assay.models import load_model
from assay.models.saving import save_pretrained


def test_every_rank_writes_the_folder_that_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("micro:llama", dtype="bfloat16").model
    monkeypatch.setattr(mixin, "_is_torch_distributed_initialized", lambda: True)
    monkeypatch.setattr(mixin, "_get_torch_distributed_rank", lambda: 1)

    save_pretrained(model, tmp_path)

    assert {"config.json", "model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
