"""Dumps that assay recognizes but cannot read. The error names the tool and the next step."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from assay.dumps.protocol import DumpError
from assay.files import open_file

_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of dump. One match of `patterns`, `folder_names` or `head` recognizes it."""

    description: str
    """Tool and content."""
    advice: str
    """The next step."""
    patterns: tuple[str, ...] = ()
    """Globs below the folder."""
    folder_names: re.Pattern[str] | None = None
    head: re.Pattern[str] | None = None
    """Text at the beginning of a file."""


_KINDS = (
    _Kind(
        "tensors of TransformerEngine's DumpTensors, whose quantized values are pickled objects",
        "save the high_precision tensors as safetensors files named MODULE.output",
        patterns=("tensor_dumps/rank_*", "rank_*/iter_*/*.pt"),
        folder_names=re.compile("tensor_dumps"),
    ),
    _Kind(
        "tensors that vLLM captured on AWS Trainium",
        "save them as safetensors files named MODULE.output, after joining the ranks",
        patterns=(
            "dp*/prefill_s*_*/*/rank*.pt",
            "dp*/decode_b*_*/*/rank*.pt",
            "prefill_s*_*/*/rank*.pt",
            "decode_b*_*/*/rank*.pt",
        ),
    ),
    _Kind(
        "a numerics log of torchtitan, which has hashes and norms of operations but no tensors",
        "compare two of these logs with torchtitan's compare_numerics.py",
        patterns=("numerics/rank_*_activations.log", "rank_*_activations.log"),
        head=re.compile(r"\ATotal captured activations: \d+"),
    ),
    _Kind(
        "a log of PyTorch's DebugMode, which has hashes of operations but no tensors",
        "record tensors instead, with assay.capture(model, FOLDER)",
        head=re.compile(r"^\s*(?:\[nn\.Mod\] |aten::[\w.]+\(.*\)\s+->)", re.MULTILINE),
    ),
    _Kind(
        "files of msprobe without their dump.json, which msprobe writes in stop()",
        "name the folder that holds dump.json; if there is none, dump again and call stop()",
        patterns=("dump_tensor_data", "construct.json", "step*/*/construct.json"),
        folder_names=re.compile("dump_tensor_data"),
    ),
    _Kind(
        "calls of an msit dump outside of the folder of their token",
        "name the folder msit_dump_TIME",
        patterns=("root*/*.pth", "root*/statistics.csv"),
    ),
)


class UnsupportedReader:
    """Reader that refuses dumps of other tools by name."""

    name = "unsupported"

    def recognize(self, path: Path) -> bool:
        """Return True for a known dump that no reader can read."""
        return _find_kind(path) is not None

    def open(self, path: Path) -> NoReturn:
        """Raise DumpError with the tool and the next step."""
        kind = _find_kind(path)
        if kind is None:
            raise DumpError(f"{path} is not a dump of a known format")
        raise DumpError(f"{path} holds {kind.description}. assay cannot read it: {kind.advice}.")


def _find_kind(path: Path) -> _Kind | None:
    if path.is_file():
        with open_file(path) as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
        return next((kind for kind in _KINDS if kind.head and kind.head.search(head)), None)
    for kind in _KINDS:
        has_name = kind.folder_names is not None and kind.folder_names.fullmatch(path.name)
        if has_name or any(next(path.glob(pattern), None) for pattern in kind.patterns):
            return kind
    return None
