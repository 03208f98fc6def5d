"""Limits of a model's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from assay.errors import UsageError
from assay.foreign_text import shorten


class _Model(Protocol):
    @property
    def config(self) -> object: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def can_generate(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The properties of a model that limit its inputs."""

    vocab_size: int
    max_positions: int | None = None
    """Length of the longest sequence; None without a limit."""
    sliding_window: int | None = None
    """Length of the shortest window of a layer; None without windows."""
    pad_token_id: int = 0
    can_generate: bool = True
    whole_prefill: str = ""
    """Why the prefill cannot be divided into chunks; "" if it can."""

    def check_ids(self, ids: Sequence[int], max_new_tokens: int, where: str) -> None:
        """Raise UsageError, starting with `where`, if the model cannot continue `ids`."""
        if not ids:
            raise UsageError(f"{where}: the prompt is empty")
        for position, id_ in enumerate(ids):
            if not 0 <= id_ < self.vocab_size:
                raise UsageError(
                    f"{where}: token id {shorten(id_)} at position {position} is outside the"
                    f" vocabulary of {self.vocab_size}"
                )
        if self.max_positions is not None and len(ids) + max_new_tokens > self.max_positions:
            raise UsageError(
                f"{where}: {len(ids)} tokens and {max_new_tokens} new ones are over the model's"
                f" context of {self.max_positions}"
            )


def limits_of(model: _Model) -> ModelLimits:
    """Return the limits of a loaded model."""
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        sliding_window=_sliding_window(model.config),
        pad_token_id=model.pad_token_id,
        can_generate=model.can_generate,
    )


def _sliding_window(config: object) -> int | None:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    has_windows = layer_types is None or "sliding_attention" in layer_types
    if window is None or not has_windows or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)
