"""Batches as data and as tensors."""

import dataclasses
import json

import torch

from assay.inputs import Batch, InputPlan, Prompt

BATCH = Batch(number=1, rows=((5, 6, 7), (9,)), prompts=(4, 5), pad_token_id=0, max_new_tokens=8)
PLAN = InputPlan((BATCH,), (Prompt("a", (5, 6, 7)), Prompt(None, (9,))), ("cut",))


def test_rows_are_padded_on_the_left() -> None:
    assert BATCH.length == 3
    assert BATCH.input_ids.dtype is torch.int64
    assert BATCH.input_ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert BATCH.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_mask_distinguishes_padding_from_a_prompt_with_the_pad_id() -> None:
    batch = dataclasses.replace(BATCH, pad_token_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_plan_survives_json() -> None:
    assert InputPlan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN


def test_hash_depends_only_on_inputs_of_the_model() -> None:
    def hash_with(**changes: object) -> str:
        return InputPlan((dataclasses.replace(BATCH, **changes),), ()).content_hash  # type: ignore[arg-type]

    same = InputPlan((BATCH,), (), ()).content_hash
    assert same == PLAN.content_hash
    others = {
        hash_with(rows=((5, 6, 8), (9,))),
        hash_with(rows=((5, 6), (7, 9))),
        hash_with(prompts=(5, 4)),
        hash_with(pad_token_id=1),
        hash_with(max_new_tokens=9),
        hash_with(prefill_chunk=2),
        InputPlan((BATCH, BATCH), ()).content_hash,
        InputPlan((), ()).content_hash,
    }
    assert len(others | {same}) == 9
