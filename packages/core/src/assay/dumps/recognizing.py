"""Recognition of dump formats, also of those that no reader reads: the error names the tool and the next step."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from assay.dumps.protocol import Dump, DumpError, Reader
from assay.dumps.readers.assay_trace import AssayReader
from assay.dumps.readers.atb import AtbReader
from assay.dumps.readers.model_folder import ModelFolderReader
from assay.dumps.readers.msit_torch import MsitTorchReader
from assay.dumps.readers.msprobe import MsprobeReader
from assay.dumps.readers.sglang import SglangReader
from assay.dumps.readers.tensor_files import TensorFilesReader
from assay.dumps.readers.transformers_debugger import TransformersDebuggerReader
from assay.errors import raised_in_words
from assay.files import UnreadableFileError, Url, open_file, parse_location
from assay.trace import RemoteCopy

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
        "name the folder that holds dump.json. Without one, call stop() at the end of the dump and repeat it",
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


# Entry points of this group add readers.
GROUP = "assay.readers"

_UNSUPPORTED = UnsupportedReader()

# Readers are asked in this order: the most general one is last.
_SHIPPED: tuple[Reader, ...] = (
    AssayReader(),
    MsprobeReader(),
    MsitTorchReader(),
    AtbReader(),
    SglangReader(),
    TransformersDebuggerReader(),
    ModelFolderReader(),
    _UNSUPPORTED,
    TensorFilesReader(),
)


@cache
def readers() -> tuple[Reader, ...]:
    """Return all readers. Those of other packages come first.

    Raises: DumpError if one of those cannot be loaded.
    """
    added = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return (*map(_load, added), *_SHIPPED)


def _load(entry: EntryPoint) -> Reader:
    try:
        reader: Reader = entry.load()()
    except (Exception, SystemExit) as error:
        problem = f"{entry.value} raised {raised_in_words(error)}"
        raise DumpError(
            f"the reader {entry.name} cannot be loaded: {problem}; repair or uninstall its package"
        ) from error
    return reader


def open_dump(
    path: str | Path, format_name: str | None = None, model_name: str | None = None
) -> Dump:
    """Open a dump of any known format.

    path: a folder, a file or a URL.
    format_name: None to recognize the format.
    model_name: the model to read in a capture of several.
    Raises: DumpError if no reader recognizes `path`, UnreadableFileError if the dump is damaged.
    """
    location = parse_location(path)
    if isinstance(location, Url):
        return _open_fetched(RemoteCopy(location), format_name, model_name)
    names = [reader.name for reader in readers() if reader is not _UNSUPPORTED]
    known = f"known formats: {', '.join(names)}"
    if format_name is not None and format_name not in names:
        raise DumpError(f"unknown format {format_name!r}; {known}")
    path = location
    with suppress(RuntimeError):  # ~NAME of an unknown user is an ordinary name
        path = path.expanduser()
    try:
        if not path.exists():
            raise DumpError(f"there is no file or folder {path}")
        for reader in readers():
            if format_name in (None, reader.name) and reader.recognize(path):
                if model_name is None:
                    return reader.open(path)
                if isinstance(reader, AssayReader):
                    return reader.open(path, model_name)
                raise DumpError(
                    f"--model-name is for captures of assay, and {path} is another dump"
                )
    except OSError as error:  # such as a folder without permission, or a name that is too long
        raise UnreadableFileError.of(error.filename or path, error) from None
    kind = f"of format {format_name}" if format_name else "of a known format"
    raise DumpError(f"{path} is not a dump {kind}; {known}")


def _open_fetched(copy: RemoteCopy, format_name: str | None, model_name: str | None) -> Dump:
    try:
        dump = open_dump(copy.path, format_name, model_name)
    except (DumpError, UnreadableFileError) as error:
        raise DumpError(copy.name_in(str(error))) from None
    return replace(
        dump,
        url=str(copy.url),
        problems=[copy.name_in(problem) for problem in dump.problems],
        tensors=[
            replace(one, load=partial(_read_fetched, copy, one.load)) if one.load else one
            for one in dump.tensors
        ],
    )


def _read_fetched(copy: RemoteCopy, load: Callable[[], Tensor]) -> Tensor:
    try:
        return load()
    except UnreadableFileError as error:
        raise UnreadableFileError(copy.name_in(str(error))) from None
