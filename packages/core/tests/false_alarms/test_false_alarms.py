"""Correct runs that differ in their numbers: the check has to pass every one."""

from pathlib import Path

import pytest

from assay.judge.limits import limits_file
from packages.core.tests.false_alarms.checked import (
    Checked,
    mended,
    readings_table,
    totals,
    variants_table,
    wrong,
)
from packages.core.tests.false_alarms.clean_runs import check_all, golden_key
from packages.core.tests.false_alarms.variants import variants
from packages.core.tests.trials.tables import publish

FEWEST_VARIANTS = 100


@pytest.fixture(scope="module")
def checked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Checked]:
    option = request.config.getoption
    named = [variant for variant in variants() if option("--variant") in variant.name]
    chosen = option("--part").take(named, golden_key)
    if not chosen:
        pytest.skip(f"no variant of generation has {option('--variant')!r} in its name")
    done = list(check_all(chosen, tmp_path_factory.mktemp("variants")))
    text = f"{readings_table(done)}\n\n{variants_table(done)}\n\n{totals(done)}"
    request.config.get_terminal_writer().line(f"\n{text}")
    if option("--publish"):
        publish(
            "false alarms",
            totals(done),
            variants_by_statistic=readings_table(done),
            variants=variants_table(done),
        )
    if option("--limits-to"):
        made_by = "nox -s false-alarms -- --corpus generation --limits-to FILE"
        text = limits_file([one.clean_run for one in done if not one.variant.known], made_by)
        Path(option("--limits-to")).write_text(text, encoding="utf-8")
    return done


def test_there_are_enough_variants_to_bound_the_rate_of_false_alarms() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names) >= FEWEST_VARIANTS


def test_no_correct_variant_fails(checked: list[Checked]) -> None:
    assert not wrong(checked)


def test_known_false_alarms_are_still_false_alarms(checked: list[Checked]) -> None:
    assert not mended(checked)


def test_every_variant_was_compared_at_every_level(checked: list[Checked]) -> None:
    for one in checked:
        ran = {name for name, level in one.outcome.verdict.levels.items() if level.compared}
        expected = {"inputs", "logits", "modules"}
        if one.outcome.verdict.model["can_generate"]:
            expected |= {"tokens", "sampler"}
        assert expected <= ran, one.variant.name
