import torch

from assay.hooks.in_place_changes import InPlaceChanges


def test_argument_changed_in_place_is_found_under_its_port() -> None:
    x, mask, extra = torch.ones(2), torch.zeros(2), torch.ones(1)
    tracer = InPlaceChanges({"x": x, "masks": {"full": mask, "window": extra}, "scale": 2.0})
    x.add(1)
    mask.fill_(-1)

    changed = list(tracer.changed())

    assert [port for port, _ in changed] == ["masks.full"]
    assert changed[0][1] is mask


def test_change_through_a_view_is_a_change_of_the_argument() -> None:
    x = torch.ones(4)
    tracer = InPlaceChanges({"x": x})
    x[:2].zero_()

    assert [port for port, _ in tracer.changed()] == ["x"]


def test_inference_tensors_are_ignored() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        tracer = InPlaceChanges({"x": x})
        x.add_(1)

        assert list(tracer.changed()) == []
