from assay.models.micro.standard_library import standard_library_text


def test_held_out_text_is_of_other_files() -> None:
    training, held_out = standard_library_text()
    assert len(training) > 5 * len(held_out) > 500_000
    assert held_out[1000:1400] not in training
