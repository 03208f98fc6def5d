"""What a model can be given, read from its configuration."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from assay.inputs import limits_of


@dataclass
class Model:
    config: SimpleNamespace = field(default_factory=SimpleNamespace)
    vocab_size: int = 260
    max_positions: int | None = 2048
    pad_token_id: int = 258
    can_generate: bool = True


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 32}, 32),
        ({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, 32),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 32, "use_sliding_window": False}, None),
        ({"sliding_window": 32, "use_sliding_window": True}, 32),
    ],
)
def test_window_counts_where_a_layer_uses_it(
    settings: dict[str, object], window: int | None
) -> None:
    assert limits_of(Model(SimpleNamespace(**settings))).sliding_window == window


def test_other_limits_are_those_of_the_model() -> None:
    limits = limits_of(Model(max_positions=None, can_generate=False))
    assert (limits.vocab_size, limits.max_positions) == (260, None)
    assert (limits.pad_token_id, limits.can_generate) == (258, False)
