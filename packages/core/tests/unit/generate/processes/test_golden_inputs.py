"""What a golden notes of the prompts that it is captured with."""

import json
from pathlib import Path

import pytest

from assay.generate.processes.input_plans import plan_inputs
from assay.generate.processes.requests import InputOptions
from assay.models import load_model


@pytest.mark.parametrize(
    ("begin", "noted"),
    [([256, 256], ["two BOS tokens (id 256) at the beginning of prompt 1"]), ([256], [])],
)
def test_prompt_that_begins_twice_is_noted(
    tmp_path: Path, begin: list[int], noted: list[str]
) -> None:
    rows = [[256, 97, 98], [*begin, 97, 98]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))

    plan = plan_inputs(
        InputOptions(prompts=str(file), max_new_tokens=1),
        load_model("micro:llama", dtype="float32"),
    )
    assert [note for note in plan.notes if "BOS" in note] == noted
