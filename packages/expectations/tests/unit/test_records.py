import json
import math
from pathlib import Path
from typing import Any

import pytest

from assay_expectations.records import (
    Content,
    Expectation,
    ExpectationError,
    Key,
    Machine,
    Settings,
    Signature,
    differences,
    read_expectation,
    write_expectation,
)

KEY = Key(
    machine=Machine(vendor="acme", architecture="a1", dtype="bfloat16", precision="bfloat16"),
    software={"torch": "2.13.0", "driver": "7"},
    content=Content(
        weights_hash="w", tokenizer_hash="t", prompts_hash="p", settings=Settings(top_k=2)
    ),
)
EXPECTATION = Expectation(
    schema=1,
    model="micro:llama",
    key=KEY,
    limits={"logits-error": 2.0, "logits-worst": 3.0},
    limits_origin="by hand",
    signature=Signature(
        tokens=[[[5]]],
        top_ids=[[[[5, 6]]]],
        yardstick=[[[[-0.5, -1.5, -math.inf]]]],
        captured=[[[[-0.25, -1.75, -math.inf]]]],
    ),
    provenance={"date": "today"},
)


def test_an_expectation_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_expectation(EXPECTATION, tmp_path / "deep")
    assert path == tmp_path / "deep/acme-a1-bfloat16-micro-llama.json"
    back = read_expectation(path)
    assert back.model_dump(exclude={"hash"}) == EXPECTATION.model_dump(exclude={"hash"})


def test_a_named_file_is_used_as_it_is(tmp_path: Path) -> None:
    assert write_expectation(EXPECTATION, tmp_path / "x.json") == tmp_path / "x.json"


def edited(path: Path, edit: dict[str, Any]) -> Path:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | edit))
    return path


def test_a_limit_that_was_changed_by_hand_is_seen(tmp_path: Path) -> None:
    path = edited(
        write_expectation(EXPECTATION, tmp_path / "x.json"),
        {"limits": {"logits-error": 200.0, "logits-worst": 3.0}},
    )
    with pytest.raises(ExpectationError) as raised:
        read_expectation(path)
    assert str(raised.value) == (
        f"expectation {path} cannot be read: its hash is not that of its content"
    )


def test_provenance_is_no_part_of_the_hash(tmp_path: Path) -> None:
    path = edited(
        write_expectation(EXPECTATION, tmp_path / "x.json"), {"provenance": {"note": "reviewed"}}
    )
    assert read_expectation(path).provenance == {"note": "reviewed"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        ("{", ": Invalid JSON"),
        ('{"schema": 1}', "model: Field required"),
    ],
)
def test_a_file_that_is_no_expectation_is_an_error_that_names_it(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ExpectationError) as raised:
        read_expectation(path)
    assert str(raised.value).startswith(f"expectation {path} cannot be read: {problem}")


def test_differences_name_both_values() -> None:
    other = KEY.model_copy(update={"software": {"torch": "2.14.0", "runtime": "1"}})
    assert differences(KEY, other) == [
        "software.driver is absent, expected 7",
        "software.runtime is 1, expected absent",
        "software.torch is 2.14.0, expected 2.13.0",
    ]
    assert differences(KEY, KEY) == []
