"""What the checks refuse before they start: a model that is absent, options that exclude one another."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from assay.api.checks import check_generate, check_load, check_train, refuse_other_mode
from assay.errors import MachineError, UsageError

OF_STEPS = ("--steps", "--resume-at")
OF_OVERFIT = ("--overfit-steps", "--track")


def check_mode(given: dict[str, object], *, overfit: bool) -> None:
    of_steps, of_overfit = (
        {name: given.get(name) for name in names} for names in (OF_STEPS, OF_OVERFIT)
    )
    refuse_other_mode(of_steps, of_overfit, overfit=overfit)


@pytest.mark.parametrize(
    ("given", "overfit", "message"),
    [
        ({"--resume-at": 2}, True, "--resume-at with --overfit"),
        ({"--steps": 3, "--resume-at": 2}, True, "--steps and --resume-at with --overfit"),
        ({"--overfit-steps": 9}, False, "--overfit-steps without --overfit"),
        ({"--track": "wandb"}, False, "--track without --overfit"),
    ],
)
def test_option_without_effect_is_refused(
    given: dict[str, object], overfit: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_mode(given, overfit=overfit)


@pytest.mark.parametrize(
    ("given", "overfit"), [({}, False), ({"--steps": 4}, False), ({"--track": "wandb"}, True)]
)
def test_options_that_go_together_are_taken(given: dict[str, object], overfit: bool) -> None:
    check_mode(given, overfit=overfit)


def test_absent_model_leaves_no_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find_nothing(*_: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", find_nothing)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", find_nothing)
    monkeypatch.chdir(tmp_path)

    for name, error in (("micro:absent", UsageError), ("owner/absent", MachineError)):
        with pytest.raises(error, match="absent"):
            check_generate(name, reference="cpu/float32", candidate="cpu/float32")
        with pytest.raises(error, match="absent"):
            check_train(name, reference="cpu/float32", candidate="cpu/float32")
        with pytest.raises(error, match="absent"):
            check_load(name)

    assert not [*tmp_path.iterdir()]
