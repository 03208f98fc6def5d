import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay_smoke.matrix.ordering import TimedJob, parse_budget, schedule_jobs

some_jobs = st.lists(
    st.builds(TimedJob, slots=st.integers(1, 8), seconds=st.floats(0.1, 100)),
    max_size=30,
)


def test_jobs_on_one_slot_run_one_after_the_other() -> None:
    assert schedule_jobs([TimedJob(4, 10.0), TimedJob(1, 5.0)], 1)[1] == 15


def test_jobs_on_disjoint_cards_run_at_once() -> None:
    jobs = [TimedJob(2, 10.0), TimedJob(1, 8.0), TimedJob(1, 7.0), TimedJob(4, 3.0)]
    assert schedule_jobs(jobs, 4)[1] == 13


def test_a_job_that_needs_more_cards_than_there_are_takes_all() -> None:
    assert schedule_jobs([TimedJob(8, 10.0), TimedJob(1, 5.0)], 2)[1] == 15


@settings(deadline=None)
@given(some_jobs, st.integers(1, 8))
def test_without_a_budget_every_job_is_scheduled_once(jobs: list[TimedJob], slots: int) -> None:
    numbers, seconds = schedule_jobs(jobs, slots)
    assert sorted(numbers) == list(range(len(jobs)))
    assert seconds <= sum(job.seconds for job in jobs) + 1e-6


@settings(deadline=None)
@given(some_jobs, st.integers(1, 4), st.floats(0.01, 200))
def test_a_budget_is_kept_unless_by_a_single_job(
    jobs: list[TimedJob], slots: int, budget: float
) -> None:
    numbers, seconds = schedule_jobs(jobs, slots, budget)
    assert len({*numbers} & {*range(len(jobs))}) == len(numbers)
    assert seconds <= budget or numbers == [0]
    assert bool(numbers) == bool(jobs)


def test_a_cheap_job_fits_where_a_dear_one_before_it_does_not() -> None:
    numbers, _ = schedule_jobs([TimedJob(1, 6.0), TimedJob(1, 5.0), TimedJob(1, 4.0)], 1, 10)
    assert numbers == [0, 2]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("90s", 90), ("1h", 3600), ("1h30m", 5400), ("1.5m", 90), ("2m 0s", None)],
)
def test_a_budget_is_read_with_its_unit(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(UsageError):
            parse_budget(text)
    else:
        assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "0m", "-5m", "5 m", "5x", "infs", "30m1h"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="a time with its unit is needed, as in 30m or 1h30m"):
        parse_budget(text)
