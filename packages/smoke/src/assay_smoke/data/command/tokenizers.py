"""Loads the tokenizer of MODEL without its weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.files import read_json_object
from assay.models.folders import fetch_config
from assay.models.loaded.tokenizer import check_tokenizer
from assay.models.loading.configs import load_config
from assay.models.loading.tokenizing import load_tokenizer
from assay.models.remote_code import RemoteCode
from assay.models.sources import ModelSource, resolve_model
from assay_smoke.data.properties import Fault, PropertyLog, SubjectReport
from assay_smoke.data.protocols import Tokenizer
from assay_smoke.data.tokens import micro_tokenizer

_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
ONE_BOS = "a text begins with one BOS, and a chat is tokenized once"


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """A model's tokenizer."""

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end generation; empty if no file declares them."""
    report: SubjectReport | None = None
    """Findings of core's level `load`; None for a generated tokenizer."""
    notes: tuple[str, ...] = field(default=())


def open_tokenizer(model: str, remote_code: RemoteCode) -> ModelTokenizer:
    """Load the tokenizer of a model or of a folder without a model, or generate one for `micro:`.

    Raises: UsageError if there is none.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        tokenizer = load_tokenizer(folder, remote_code)
        return _examine(model, tokenizer, _stand_in_config(tokenizer), _eos_ids(folder))
    source = resolve_model(model)
    if source.kind == "micro":
        note = f"{model} has no tokenizer: a generated one is used, whose ids are bytes"
        return ModelTokenizer(micro_tokenizer(), notes=(note,))
    folder = _tokenizer_folder(source)
    config = load_config(folder, remote_code)
    return _examine(model, load_tokenizer(folder, remote_code), config, _eos_ids(folder))


def _tokenizer_folder(source: ModelSource) -> Path:
    if source.folder is not None:
        return source.folder
    from huggingface_hub import snapshot_download

    fetch_config(source.reference)  # raises a clear error for a wrong name or an absent hub
    return Path(
        snapshot_download(
            source.reference, allow_patterns=_TOKENIZER_FILES, ignore_patterns=["*/*"]
        )
    )


def _stand_in_config(tokenizer: Tokenizer) -> Any:  # noqa: ANN401 - transformers
    """Make a configuration whose vocabulary fits a tokenizer without a model."""
    from transformers import PretrainedConfig

    config: Any = PretrainedConfig()
    config.vocab_size = max(tokenizer.get_vocab().values(), default=0) + 1
    return config


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the ids that end generation from generation_config.json, or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        ids = read_json_object(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _examine(
    model: str,
    tokenizer: Tokenizer,
    config: Any,  # noqa: ANN401 - transformers
    eos_token_ids: tuple[int, ...],
) -> ModelTokenizer:
    wrong, notes = check_tokenizer(tokenizer, config, eos_token_ids)
    log = PropertyLog(f"the tokenizer of {model}", (ONE_BOS,))
    log.judge([ONE_BOS], [Fault(ONE_BOS, "; ".join(wrong))] if wrong else [])
    for note in notes:
        log.note(note)
    return ModelTokenizer(tokenizer, eos_token_ids, log.report())
