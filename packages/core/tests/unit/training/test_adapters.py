import sys
from pathlib import Path

import pytest
from torch import nn

from assay.errors import UsageError
from assay.training.adapters import ADAPTER_FILE, AdapterError, add_lora, read_adapter


def test_lora_without_peft_is_an_error_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError) as raised:
        add_lora(nn.Linear(2, 2), dropout=0.0)
    assert str(raised.value).startswith(
        "LoRA needs peft, which comes with assay-smoke: pip install assay-smoke"
    )


@pytest.mark.parametrize("content", [None, b"", b"no safetensors file"])
def test_an_adapter_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / ADAPTER_FILE).write_bytes(content)
    with pytest.raises(AdapterError, match=rf"^the adapter in {tmp_path / ADAPTER_FILE} cannot be"):
        read_adapter(tmp_path)
