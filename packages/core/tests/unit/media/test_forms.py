"""The forms in which a model may take an image or a sound follow from its arguments and its configuration."""

from assay.media.forms import likely_images


def test_sound_is_tried_without_its_mask_too() -> None:
    settings = {"num_mel_bins": 80}
    arguments = dict.fromkeys(("input_features", "input_features_mask"))

    forms = likely_images(lambda *keys: settings.get(keys[0]), arguments)

    names = [{one.name for one in sounds[0]} for sounds in forms]
    assert names.count({"input_features"}) == names.count({*arguments}) == 2
