import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay_smoke.matrix.choosing.schedules import (
    Job,
    Machine,
    parse_budget,
    share_out,
    share_out_within,
)

some_jobs = st.lists(
    st.builds(Job, item=st.integers(), slots=st.integers(1, 8), seconds=st.floats(0.1, 100)),
    max_size=30,
)


def machines(number: int, num_slots: int = 1) -> list[Machine[int]]:
    return [Machine(num_slots) for _ in range(number)]


def jobs_of(shards: list[Machine[int]]) -> list[Job[int]]:
    return [job for shard in shards for job in shard.jobs]


def test_jobs_on_one_slot_run_one_after_the_other() -> None:
    (machine,) = shards = machines(1)
    share_out([Job(1, 4, 10.0), Job(2, 1, 5.0)], shards)
    assert machine.seconds == 15


def test_jobs_on_disjoint_cards_run_at_once() -> None:
    (machine,) = shards = machines(1, num_slots=4)
    share_out([Job(1, 2, 10.0), Job(2, 1, 8.0), Job(3, 1, 7.0), Job(4, 4, 3.0)], shards)
    assert machine.seconds == 13


def test_a_job_that_needs_more_cards_than_there_are_takes_all() -> None:
    (machine,) = shards = machines(1, num_slots=2)
    share_out([Job(1, 8, 10.0), Job(2, 1, 5.0)], shards)
    assert machine.seconds == 15


@settings(deadline=None)
@given(some_jobs, st.integers(1, 6), st.integers(1, 8))
def test_every_job_is_in_one_shard(jobs: list[Job[int]], number: int, slots: int) -> None:
    shards = machines(number, slots)
    share_out(jobs, shards)
    assert sorted(map(id, jobs_of(shards))) == sorted(map(id, jobs))


@settings(deadline=None)
@given(some_jobs, st.integers(1, 6))
def test_shards_differ_by_no_more_than_one_job(jobs: list[Job[int]], number: int) -> None:
    shards = machines(number)
    share_out(jobs, shards)
    seconds = [shard.seconds for shard in shards]
    longest = max((job.seconds for job in jobs), default=0.0)
    assert max(seconds) - min(seconds) <= longest + 1e-6


@settings(deadline=None)
@given(some_jobs, st.integers(1, 4), st.integers(1, 4), st.floats(0.01, 200))
def test_a_budget_is_kept_unless_by_a_single_job(
    jobs: list[Job[int]], number: int, slots: int, budget: float
) -> None:
    shards = machines(number, slots)
    left = share_out_within(budget, jobs, shards)
    taken = jobs_of(shards)
    assert sorted(map(id, [*taken, *left])) == sorted(map(id, jobs))
    assert max(shard.seconds for shard in shards) <= budget or taken == jobs[:1]
    assert bool(taken) == bool(jobs)


def test_a_cheap_job_fits_where_a_dear_one_before_it_does_not() -> None:
    (shard,) = shards = machines(1)
    left = share_out_within(10, [Job(1, 1, 6.0), Job(2, 1, 5.0), Job(3, 1, 4.0)], shards)
    assert [job.item for job in shard.jobs] == [1, 3]
    assert [job.item for job in left] == [2]


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
