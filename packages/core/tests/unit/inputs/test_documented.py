"""The tensors of documented arguments have the shapes that their documentation names."""

from typing import Any

import pytest

from assay.inputs import document_arguments, likely_tensors

SETTINGS = {"speaker_dim": 12, "hidden_size": 64, "d_model": 32, "image_size": [24, 40]}


def forward(
    input_ids: Any,
    pixel_values: Any,
    boxes: Any,
    speaker: Any,
    states: Any,
    kinds: Any,
    sound_mask: Any = None,
    labels: Any = None,
) -> None:
    """Compute.

    Args:
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
            Tokens.
        pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`):
            Image.
        boxes (`torch.Tensor` of shape `(batch_size, num_boxes, 4)`, *optional*):
            Corners.
        speaker (`torch.FloatTensor` of shape `(batch_size, config.speaker_dim)`):
            Voice.
        states (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
            States.
        kinds (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
            Kinds of the tokens.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Labels.
        other (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            No argument of this function.
    """


def read(*keys: str) -> Any:
    return next((SETTINGS[key] for key in keys if key in SETTINGS), None)


def first(name: str, *, of_tokens: bool = False) -> Any:
    documented = document_arguments(forward)
    return next(likely_tensors(name, documented, read, of_tokens=of_tokens))


def test_ids_labels_and_unknown_names_are_left_out() -> None:
    known = [*document_arguments(forward)]
    assert known == ["pixel_values", "boxes", "speaker", "states", "kinds", "sound_mask"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("pixel_values", (1, 3, 24, 40)), ("boxes", (1, 4, 4)), ("speaker", (1, 12))],
)
def test_sizes_are_those_of_the_configuration(name: str, shape: tuple[int, ...]) -> None:
    assert first(name).shape == shape


def test_sequence_follows_the_text_of_a_model_that_reads_one() -> None:
    assert (first("states").layout, first("states", of_tokens=True).layout) == ("batch", "token")


def test_sound_has_a_length_of_its_own_next_to_a_text() -> None:
    def hear(input_ids: Any, input_features: Any) -> None:
        """Compute.

        Args:
            input_features (`torch.FloatTensor` of shape `(batch_size, sequence_length, feature_dim)`):
                Sound.
        """

    documented = document_arguments(hear)
    sound = next(likely_tensors("input_features", documented, read, of_tokens=True))
    assert sound.layout == "batch"


def test_each_width_of_the_configuration_is_tried() -> None:
    tried = likely_tensors("states", document_arguments(forward), read, of_tokens=False)
    assert {one.shape for one in tried} >= {(1, 4, 32), (1, 4, 64)}


def test_long_tensors_hold_whole_numbers() -> None:
    assert first("kinds").values.tolist() == [[1, 0, 1, 0]]
    assert first("boxes").values.is_floating_point()


def test_time_series_covers_its_lags_before_the_context() -> None:
    def forecast(past_time_features: Any, past_observed_mask: Any) -> None:
        """Compute.

        Args:
            past_time_features (`torch.Tensor` of shape `(batch_size, sequence_length, num_features)`):
                Days.
            past_observed_mask (`torch.BoolTensor` of shape `(batch_size, sequence_length)` or `(batch_size, \
sequence_length, input_size)`, *optional*):
                Ones.
        """

    settings = {
        "input_size": 2,
        "context_length": 12,
        "lags_sequence": [1, 2],
        "num_time_features": 3,
    }
    documented = document_arguments(forecast)
    features, mask = (
        [
            one.shape
            for one in likely_tensors(
                name, documented, lambda *keys: settings.get(keys[0]), of_tokens=False
            )
        ]
        for name in documented
    )
    assert features[0] == (1, 14, 3)
    assert mask[0] == (1, 14)
    assert (1, 14, 2) in mask


def test_other_quotes_and_brackets_and_boxes_of_tokens_are_read() -> None:
    def read_boxes(input_ids: Any, bbox: Any, noise: Any, corners: Any) -> None:
        """Compute.

        Args:
            bbox (`'torch.Tensor'` of shape '(batch_size, num_boxes, 4)'):
                Corners of the box for each token.
            noise (`torch.Tensor` of shape `[batch_size, config.speaker_dim, dim]`):
                Start.
            corners (`torch.LongTensor` of shape `({0}, 4)`):
                Boxes.
        """

    documented = document_arguments(read_boxes)
    bbox, noise, corners = (
        next(likely_tensors(name, documented, read, of_tokens=True))
        for name in ("bbox", "noise", "corners")
    )
    assert (bbox.layout, bbox.shape) == (corners.layout, corners.shape) == ("token", (1, 4))
    assert noise.shape == (1, 12, 64)


def test_required_argument_without_documentation_is_a_sequence_of_states_or_a_vector() -> None:
    def act(action_embeds: Any, noise: Any = None) -> None:
        """Compute."""

    documented = document_arguments(act)
    assert [*documented] == ["action_embeds"]
    tried = likely_tensors("action_embeds", documented, read, of_tokens=False)
    assert {one.shape for one in tried} >= {(1, 4, 64), (1, 64)}
