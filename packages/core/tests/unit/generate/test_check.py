"""What is wrong with the options is said before any process, and a failing candidate keeps the reference."""

from pathlib import Path

import pytest

from assay.devices.run_string import Run
from assay.errors import UsageError
from assay.generate.check import _CANDIDATE, capture, check_generate
from assay.generate.spec import GenerateCheck, GoldenSpec, InputOptions
from assay.runs import SilentProgress


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def fail_in_candidate(function: object, *args: object, **kwargs: object) -> None:
    if function is _CANDIDATE:
        raise UsageError("plant.py:setup raised TypeError")


@pytest.mark.parametrize("is_given", [False, True])
def test_failing_candidate_names_the_reference_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_given: bool
) -> None:
    monkeypatch.setattr("assay.generate.check.call", fail_in_candidate)
    check = GenerateCheck(
        model="micro:llama",
        reference=None if is_given else Run("cpu", "float32"),
        golden=tmp_path if is_given else None,
        candidate=Run("cpu", "bfloat16"),
        verify_golden=False,
    )
    progress = Notes()

    with pytest.raises(UsageError, match="setup raised TypeError"):
        check_generate(check, tmp_path, progress)

    kept = f"the reference is kept: --golden {tmp_path} reads it again"
    assert progress.notes == ([] if is_given else [kept])


REFERENCE, CANDIDATE = Run("cpu", "float32"), Run("cpu", "bfloat16")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("assay.generate.check.call", refuse)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ('{"prompt"', "prompts.jsonl, line 1: not JSON"),
        ("{", "prompts.jsonl: not JSON"),  # as an expectation begins
        (
            '{"prompt": "a"}\n{"question": "b"}',
            "prompts.jsonl, line 2: needs an object with one of",
        ),
        ('{"ids": ["a"]}', "ids must be a list of whole numbers"),
    ],
)
def test_prompts_that_no_model_could_take(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert_refused(tmp_path, InputOptions(prompts=str(path)), message)


def test_chat_template_without_texts_of_the_user_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, InputOptions(chat=True), "--chat is for the texts of --prompts FILE")


def assert_refused(tmp_path: Path, inputs: InputOptions, message: str) -> None:
    spec = GoldenSpec(
        model="micro:llama",
        reference=REFERENCE,
        noise_for=["bfloat16"],
        folder=tmp_path,
        inputs=inputs,
    )
    check = GenerateCheck(
        model="micro:llama", reference=REFERENCE, candidate=CANDIDATE, inputs=inputs
    )

    with pytest.raises(UsageError, match=message):
        capture(spec, tmp_path, SilentProgress())
    with pytest.raises(UsageError, match=message):
        check_generate(check, tmp_path, SilentProgress())


def test_candidate_option_and_length_that_are_unknown(tmp_path: Path) -> None:
    options = GenerateCheck(
        model="micro:llama",
        reference=REFERENCE,
        candidate=CANDIDATE,
        options={"tempo": "fast"},
    )
    length = GenerateCheck(
        model="micro:llama",
        reference=REFERENCE,
        candidate=CANDIDATE,
        inputs=InputOptions(prompt_length="long"),
    )

    with pytest.raises(UsageError, match="unknown candidate option 'tempo'"):
        check_generate(options, tmp_path, SilentProgress())
    with pytest.raises(UsageError, match="prompt length 'long'"):
        check_generate(length, tmp_path, SilentProgress())
