"""Read GGUF files under the names, layouts and settings of transformers, without the code that loads them.

Sources: llama.cpp, the description of the GGUF format, and `convert_hf_to_gguf.py`, which pairs the rows of the rotary
projections of Llama, and adds one to the norms of Gemma.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError, name_some
from assay.files import open_file
from assay.files.safetensors import HeaderEntry

if TYPE_CHECKING:
    from torch import Tensor

GGUF = "model.gguf"
"""Name of the file in the folder that `write_description` makes."""
PREFIX = "gguf_"
"""A quantized weight `NAME.weight` is listed as `NAME.gguf_TYPE`, the bytes of its blocks by row."""
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_FLOAT_TYPES = ("F32", "F16", "BF16")

_WITH_PAIRED_ROWS = "llama"
_WITH_NORMS_PLUS_ONE = ("gemma2", "gemma3")
_ARCHITECTURES = (_WITH_PAIRED_ROWS, "qwen2", "qwen3", *_WITH_NORMS_PLUS_ONE)
_NAME = re.compile(r"(blk)?(?:\.(\d+)\.)?(\w+)\.(weight|bias)")
_MODULES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_MODULES_OF_LAYERS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_MODULES_OF_GEMMA = _MODULES_OF_LAYERS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_ROPE_FACTORS = "rope_freqs.weight"
_OUTSIDE_LAYERS = {"output.weight": "lm_head.weight", _ROPE_FACTORS: _ROPE_FACTORS}

# Metadata `ARCHITECTURE.KEY` that change results but no shape, and the keys of config.json.
_SETTINGS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
_SAME_SETTING = 1e-6  # they are float32


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    architecture: str
    settings: Mapping[str, Any]
    """Metadata by the part of the key after the architecture."""
    tensors: Mapping[str, HeaderEntry]
    """By the name in transformers."""
    has_tokenizer: bool

    @property
    def plus_one(self) -> frozenset[str]:
        """Return the names of the tensors that are stored plus one."""
        is_offset = self.architecture in _WITH_NORMS_PLUS_ONE
        return frozenset(name for name in self.tensors if is_offset and "norm." in name)

    def restore(self, name: str, stored: "Tensor") -> "Tensor":
        """Return a stored tensor, or its blocks by row, in the layout of transformers."""
        if name in self.plus_one:
            return stored - 1
        match = re.search(r"\.([qk])_proj\.", name)
        if self.architecture != _WITH_PAIRED_ROWS or match is None:
            return stored
        count = self.settings["attention.head_count"]
        if match[1] == "k":
            count = self.settings.get("attention.head_count_kv", count)
        pairs: Tensor = stored.unflatten(0, (int(count), -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    def find_ignored_settings(self, config: Any) -> Iterator[str]:  # noqa: ANN401 - of transformers
        """Describe the metadata that a loaded configuration does not follow."""
        rotary = getattr(config, "rope_parameters", None) or {}
        rotary = rotary.get("full_attention", rotary)
        if _ROPE_FACTORS in self.tensors and rotary.get("rope_type") == "default":
            yield f"rope_type is default in memory, {_ROPE_FACTORS} is in the file"
        for key, name in _SETTINGS.items():
            wanted = self.settings.get(key)
            actual = getattr(config, name, None) or rotary.get(name)
            if not isinstance(wanted, int | float) or actual is None:
                continue
            if abs(wanted - actual) > _SAME_SETTING * abs(wanted):
                place = f"the metadata {self.architecture}.{key}"
                yield f"{name} is {actual:g} in memory, {wanted:g} in {place}"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`, or the only one of a folder without other weights; None for other models.

    Raises: UsageError if the folder has several, or if a needed package is missing.
    """
    files = [path] if path.suffix == ".gguf" and path.is_file() else []
    if path.is_dir() and not [*path.glob("*.safetensors"), *path.glob("*.bin")]:
        files = sorted(path.glob("*.gguf"))
    if not files:
        return None
    if len(files) > 1:
        names = name_some([one.name for one in files])
        raise UsageError(f"{path} has several GGUF files ({names}): give one of them as the model")
    for package in ("gguf", "accelerate"):  # transformers needs both
        if find_spec(package) is None:
            problem = f"the package {package} is not installed: pip install 'assay-core[gguf]'"
            raise UsageError(f"{files[0].name}: {problem}")
    with open_file(files[0]):
        return files[0].resolve()


def read_gguf(file: Path) -> GgufFile:
    """Read the header of a GGUF file. Raises: UsageError, naming the file, if assay cannot read it."""
    return _read_header(file.resolve(), file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_header(file: Path, _modified: int) -> GgufFile:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        kind = str(reader.fields["general.architecture"].contents())
        settings = {
            key.removeprefix(f"{kind}."): field.contents()
            for key, field in reader.fields.items()
            if key.startswith(f"{kind}.")
        }
    except Exception as error:  # any: the reader checks little
        raise UsageError(f"{file} cannot be read as GGUF: {error}") from error
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UsageError(
            f"{file}: assay does not read GGUF of the architecture {kind}, only {known}"
        )
    entries = [_make_entry(file, one, kind) for one in reader.tensors]
    has_tokenizer = "tokenizer.ggml.tokens" in reader.fields
    return GgufFile(kind, settings, {one.name: one for one in entries}, has_tokenizer)


def _make_entry(file: Path, tensor: Any, architecture: str) -> HeaderEntry:  # noqa: ANN401 - of gguf
    name, kind = _OUTSIDE_LAYERS.get(tensor.name), tensor.tensor_type.name
    match = _NAME.fullmatch(tensor.name)
    if name is None and match is not None:
        is_gemma = architecture in _WITH_NORMS_PLUS_ONE
        of_layers = _MODULES_OF_GEMMA if is_gemma else _MODULES_OF_LAYERS
        module = (of_layers if match[1] else _MODULES).get(match[3])
        place = f"layers.{match[2]}.{module}" if match[1] else module
        name = f"model.{place}.{match[4]}" if module else None
    if name is None or kind not in (*_FLOAT_TYPES, *BLOCK_TYPES):
        problem = f"assay does not read {tensor.name} of type {kind} in a {architecture}"
        raise UsageError(f"{file}: {problem}; types: {', '.join((*_FLOAT_TYPES, *BLOCK_TYPES))}")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if kind in BLOCK_TYPES:
        name = f"{name.removesuffix('weight')}{PREFIX}{kind}"
        shape, kind = tuple(tensor.data.shape), "U8"
    first = int(tensor.data_offset)
    return HeaderEntry(name, file, kind, shape, first, first + int(tensor.n_bytes))


def write_description(file: Path, folder: Path) -> None:
    """Make a folder with a link to the file, and with what transformers reads in it: config.json and tokenizer.

    Raises: UsageError if transformers refuses the file.
    """
    import numpy as np
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    header = read_gguf(file)
    folder.mkdir()
    (folder / GGUF).symlink_to(file)
    try:
        config = AutoConfig.from_pretrained(file.parent, **given)
        if header.has_tokenizer:
            AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
    except Exception as error:  # any: each class validates differently
        raise UsageError(f"{file} is refused by transformers: {error}") from error
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    settings = config.to_dict() | {
        "architectures": [architecture],
        "quantization_config": {"quant_method": "gguf"},
    }
    # The shortest decimal numbers: 1e-6 in float32 is 9.99999997e-7.
    short = json.loads(json.dumps(settings), parse_float=lambda text: float(str(np.float32(text))))
    (folder / "config.json").write_text(json.dumps(short, indent=2))
