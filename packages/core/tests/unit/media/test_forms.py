"""The forms in which a model may take an image or a sound follow from its arguments and its configuration."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from assay.media.forms import likely_images, likely_values


def test_sound_is_tried_without_its_mask_too() -> None:
    settings = {"num_mel_bins": 80}
    arguments = dict.fromkeys(("input_features", "input_features_mask"))

    forms = likely_images(lambda *keys: settings.get(keys[0]), arguments)

    names = [{one.name for one in sounds[0]} for sounds in forms]
    assert names.count({"input_features"}) == names.count({*arguments}) == 2


def test_image_of_patches_is_tried_as_a_padded_row() -> None:
    forms = [*likely_images(lambda *_: None, dict.fromkeys(("pixel_values", "image_grid_thw")))]

    # Patches of 14 x 14 pixels in 3 channels, two of them merged along each axis: 4 x 6 and 8 x 2.
    assert [one[0].shape for one in forms[0]] == [(24, 588), (16, 588)]
    assert [one[0].shape for one in forms[-1]] == [(1, 24, 588), (1, 16, 588)]


def test_second_image_has_the_shape_of_an_image() -> None:
    model: Any = nn.Module()
    model.config = SimpleNamespace(image_size=32)

    loaded: Any = SimpleNamespace(model=model, reads_tokens=True)
    tried = likely_values(loaded, "codebook_pixel_values", {"codebook_pixel_values": ("", "")})

    assert next(tried).shape == (1, 3, 32, 32)
