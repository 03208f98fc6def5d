"""The estimated time of the phases of a check."""

from dataclasses import replace

import pytest

from assay.estimates.products import Product
from assay.estimates.speed import Speed
from assay.estimates.trial_call import TrialCall
from assay.generate.processes.estimates.durations import Durations
from assay.inputs import Batch

WIDE, NARROW = Speed(weight=4e-9, product=4e-11), Speed(weight=1e-9, product=1e-11)
BATCH = Batch(0, ((1,) * 100,) * 4, (0, 1, 2, 3), 0, 33)
PRODUCT = Product((10**4, 10**4), is_transposed=True)
DURATIONS = Durations(
    TrialCall(num_values=1e5, seconds=0.1, products=[PRODUCT]),
    num_weights=2 * 10**8,
    stored_bytes=10**9,
    batches=[BATCH],
    reads_texts=True,
)
GENERATES, RECORDS, FORCED, MEASURES = 2, 4, 7, 10


def test_generation_takes_its_prompts_and_every_step() -> None:
    prompts, of_step = 400 * 10**8 * WIDE.product, 0.05 + 10**8 * WIDE.weight

    assert DURATIONS.of_reference(WIDE, NARROW)[GENERATES] == pytest.approx(prompts + 32 * of_step)


def test_text_in_one_call_is_forced_in_less_time_than_its_steps() -> None:
    stepwise = replace(DURATIONS, reads_texts=False)

    texts, steps = (one.of_reference(WIDE, NARROW) for one in (DURATIONS, stepwise))

    assert len(texts) == len(steps) == 11
    assert texts[GENERATES] == steps[GENERATES]
    for phase in (RECORDS, FORCED, MEASURES):
        assert texts[phase] < steps[phase]


def test_noise_run_of_chosen_experts_is_forced_step_by_step() -> None:
    chosen = replace(DURATIONS.trial, products=[replace(PRODUCT, is_chosen=True)])
    experts = replace(DURATIONS, trial=chosen)

    texts, steps = (one.of_reference(WIDE, NARROW) for one in (DURATIONS, experts))

    assert [number for number in range(11) if texts[number] != steps[number]] == [FORCED]
    assert texts[FORCED] < steps[FORCED]


def test_first_batch_runs_again_and_one_of_its_texts_is_followed() -> None:
    two = replace(DURATIONS, batches=[BATCH, replace(BATCH, number=1, max_new_tokens=400)])

    *_, again, of_text, _ = DURATIONS.of_candidate(NARROW)

    assert two.of_candidate(NARROW)[-3:-1] == [again, of_text]
    assert again == pytest.approx(4 * of_text, rel=0.5)


def test_candidate_replays_every_step() -> None:
    *_, of_texts = DURATIONS.of_reference(WIDE, NARROW)
    *_, of_steps = DURATIONS.of_candidate(NARROW)

    assert of_steps > of_texts
    assert len(DURATIONS.of_candidate(NARROW)) == 9
