"""Correct training runs that differ in their numbers: the check has to pass every one."""

from pathlib import Path

import pytest

from assay.judge.limits import DerivedLimit, limits_file
from packages.core.tests.false_alarms.checked import (
    Checked,
    mended,
    readings_table,
    totals,
    variants_table,
    wrong,
)
from packages.core.tests.false_alarms.parts import Part
from packages.core.tests.false_alarms.training_runs import check_all_training
from packages.core.tests.false_alarms.training_variants import TrainingVariant, training_variants
from packages.core.tests.trials.tables import publish

FEWEST_VARIANTS = 300
LEVELS = {"inputs", "loss", "activations", "gradients", "updates", "checkpoint"}

# Of the free run's losses, which are no maximum over hundreds of places.
LOSS_ERROR = DerivedLimit(
    20.0,
    "It compares the root mean squares of a few numbers. If both errors are normal, its square"
    " has the distribution F(3, 3) over three steps, which is over 400 once in 5,000 times.",
)


@pytest.fixture(scope="module")
def checked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Checked]:
    option = request.config.getoption
    named = [variant for variant in training_variants() if option("--variant") in variant.name]
    chosen = option("--part").take(named, lambda variant: variant.golden)
    if not chosen:
        pytest.skip(f"no variant of training has {option('--variant')!r} in its name")
    done = check_all_training(chosen, tmp_path_factory.mktemp("variants"))
    text = f"{readings_table(done)}\n\n{variants_table(done)}\n\n{totals(done)}"
    request.config.get_terminal_writer().line(f"\n{text}")
    if option("--publish"):
        publish(
            "false alarms of training",
            totals(done),
            training_variants_by_statistic=readings_table(done),
            training_variants=variants_table(done),
        )
    if option("--limits-to"):
        made_by = "nox -s false-alarms -- --corpus training --limits-to FILE"
        clean = [one.clean_run for one in done if not one.variant.known]
        text = limits_file(clean, made_by, {"loss-error": LOSS_ERROR})
        Path(option("--limits-to")).write_text(text, encoding="utf-8")
    return done


def test_there_are_enough_variants_to_bound_the_rate_of_false_alarms() -> None:
    names = [variant.name for variant in training_variants()]

    assert len(set(names)) == len(names) >= FEWEST_VARIANTS


def test_parts_have_every_variant_once() -> None:
    variants = list(training_variants())
    parts = [Part(number, 4).take(variants, lambda one: one.golden) for number in range(1, 5)]

    assert sorted(one.name for part in parts for one in part) == sorted(v.name for v in variants)
    assert max(map(len, parts)) < 1.1 * min(map(len, parts))


def test_no_correct_variant_fails(checked: list[Checked]) -> None:
    assert not wrong(checked)


def test_known_false_alarms_are_still_false_alarms(checked: list[Checked]) -> None:
    assert not mended(checked)


def test_every_variant_was_compared_at_every_level(checked: list[Checked]) -> None:
    for one in checked:
        variant, verdict = one.variant, one.outcome.verdict
        assert isinstance(variant, TrainingVariant)
        copies = any(axis != "pp" and size > 1 for axis, size in variant.mesh)
        expected = LEVELS | ({"replicas"} if copies else set())
        ran = {name for name, level in verdict.levels.items() if level.verdict and level.compared}
        assert ran >= expected, variant.name


def test_every_variant_ran_as_it_was_meant_to(checked: list[Checked]) -> None:
    for one in checked:
        variant, candidate = one.variant, one.outcome.verdict.candidate
        assert isinstance(variant, TrainingVariant)
        asked = {*variant.features, *(["lora"] if variant.train_options.lora else [])}
        assert candidate["run"] == f"{variant.device}/{variant.dtype}"
        assert candidate["trainer"] == (variant.trainer or "reference"), variant.name
        assert candidate["setup"] == variant.setup, variant.name
        assert candidate["mesh"] == dict(variant.mesh), variant.name
        assert set(candidate["features"]) == asked, variant.name
