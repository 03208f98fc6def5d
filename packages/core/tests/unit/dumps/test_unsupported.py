"""Dumps that are recognized and refused by name."""

from pathlib import Path

import pytest
import torch
from torch.utils._debug_mode import DebugMode

from assay.dumps.protocol import DumpError
from assay.dumps.recognizing import open_dump


def refusal(path: Path) -> str:
    with pytest.raises(DumpError) as raised:
        open_dump(path)
    message = str(raised.value)
    assert message.startswith(f"{path} holds ")
    return message


@pytest.mark.parametrize(
    ("file", "path", "tool"),
    [
        ("tensor_dumps/rank_0/iter_000100/fc1_activation.pt", ".", "TransformerEngine"),
        ("tensor_dumps/rank_0/iter_000100/fc1_activation.pt", "tensor_dumps", "TransformerEngine"),
        ("tensor_dumps/rank_0/fc1_activation_iter_000100.pt", ".", "TransformerEngine"),
        ("dp0/prefill_s128_0/model.layers.0/rank0.pt", ".", "vLLM captured on AWS Trainium"),
        ("dp0/decode_b1_0/model.layers.0/rank0.pt", "dp0", "vLLM captured on AWS Trainium"),
        ("numerics/rank_0_activations.log", ".", "torchtitan"),
        ("numerics/rank_0_activations.log", "numerics", "torchtitan"),
        ("step0/rank0/construct.json", ".", "msprobe without their dump.json"),
        ("step0/rank0/dump_tensor_data/a.pt", "step0/rank0/dump_tensor_data", "msprobe"),
        ("renamed/dump_tensor_data/a.pt", "renamed", "msprobe without their dump.json"),
        ("root.model.norm/output.pth", ".", "msit dump"),
    ],
)
def test_folder_is_refused_by_name(tmp_path: Path, file: str, path: str, tool: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    torch.save(torch.zeros(1), tmp_path / file)
    assert tool in refusal(tmp_path / path)


def test_message_says_what_to_do_instead(tmp_path: Path) -> None:
    (tmp_path / "numerics").mkdir()
    (tmp_path / "numerics" / "rank_0_activations.log").touch()
    assert refusal(tmp_path) == (
        f"{tmp_path} holds a numerics log of torchtitan, which has hashes and norms of operations"
        " but no tensors. assay cannot read it: compare two of these logs with torchtitan's"
        " compare_numerics.py."
    )


def test_log_of_torchtitan_is_refused(tmp_path: Path) -> None:
    text = f"Total captured activations: 1\n{'=' * 80}\n\n[layers.0.wq/op_0_mm]\n  Min: -1.0e+00\n"
    (tmp_path / "a.log").write_text(text)
    assert "numerics log of torchtitan" in refusal(tmp_path / "a.log")


@pytest.mark.parametrize("record_nn_module", [False, True])
def test_log_of_debug_mode_is_refused(tmp_path: Path, record_nn_module: bool) -> None:
    with DebugMode(record_nn_module=record_nn_module) as mode:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    (tmp_path / "a.txt").write_text(mode.debug_string())
    assert "PyTorch's DebugMode" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize("text", ["", "a log of something\n", "\x00\xff"])
def test_other_text_is_not_recognized(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(DumpError, match="is not a dump of a known format"):
        open_dump(tmp_path / "a.log")
