"""For all shapes, correct code has no finding, and a fault is found wherever it has an effect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from assay.plugins import load_object
from assay_smoke.data import accumulation, chats, collating, sampling
from assay_smoke.data.protocols import LoaderPlan, Message
from assay_smoke.data.tokens import Conversation, micro_tokenizer
from assay_smoke.data.verdict import Subject, SubjectReport

PLANTS = Path(__file__).parents[2] / "data_plants"

# The same examples in every run; none is stored.
settings.register_profile(
    "data",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
DRAWN = settings(settings.get_profile("data"))
FEW = settings(DRAWN, max_examples=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plant(file: str, name: str) -> Any:
    return load_object(f"{PLANTS / file}:{name}")


def broken(report: SubjectReport) -> set[str]:
    return {finding.name for finding in report.findings}


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=8).map(tuple)
tokenizers = st.builds(
    micro_tokenizer,
    st.sampled_from(["own", "eos"]),
    st.sampled_from(["nobody", "template", "tokenizer", "both"]),
)


@given(lengths, tokenizers, st.sampled_from(["masked", "plain"]))
@DRAWN
def test_samples_of_any_lengths_are_padded_rightly(drawn: Any, tokenizer: Any, kind: Any) -> None:
    collator = plant("collators.py", "right_padded")
    report = collating.check_padding(Subject("right"), collator, [tokenizer], kind, [drawn])
    assert report.findings == []
    assert report.untried == []
    has_own_pad = tokenizer.pad_token_id != tokenizer.eos_token_id
    assert [note.split(":")[0] for note in report.notes] == (
        ["padding with EOS was not tried"] if has_own_pad else []
    )


@given(lengths, tokenizers)
@DRAWN
def test_a_masked_end_is_found_just_where_padding_is_eos(drawn: Any, tokenizer: Any) -> None:
    collator = plant("collators.py", "pad_id_masked")
    report = collating.check_padding(Subject("wrong"), collator, [tokenizer], batches=[drawn])
    # A sample of one token has no end, so that it has nothing to lose.
    has_effect = tokenizer.pad_token_id == tokenizer.eos_token_id and max(drawn) > 1
    assert (collating.LABELS in broken(report)) is has_effect


@given(lengths, tokenizers)
@DRAWN
def test_a_lost_row_is_found_wherever_there_is_a_second(drawn: Any, tokenizer: Any) -> None:
    collator = plant("collators.py", "first_row_only")
    report = collating.check_padding(Subject("wrong"), collator, [tokenizer], batches=[drawn])
    assert (collating.ONE_ROW_EACH in broken(report)) is (len(drawn) > 1)


@given(lengths, st.sampled_from(["masked", "plain"]))
@FEW
def test_samples_of_any_lengths_are_packed_rightly(drawn: Any, kind: Any) -> None:
    collator = plant("collators.py", "right_packed")
    report = collating.check_packing(Subject("right"), collator, [micro_tokenizer()], kind, [drawn])
    assert report.findings == []
    assert report.untried == []


@given(lengths)
@FEW
def test_a_leak_is_found_wherever_two_samples_share_a_row(drawn: Any) -> None:
    collator = plant("collators.py", "packed_with_mask_of_ones")
    report = collating.check_packing(Subject("wrong"), collator, [micro_tokenizer()], packs=[drawn])
    assert broken(report) == ({collating.ISOLATED} if len(drawn) > 1 else set())


plans = st.builds(
    LoaderPlan,
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    num_epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)


@given(plans, st.sampled_from(["right", "Stateful"]))
@DRAWN
def test_any_number_of_samples_is_divided_rightly(plan: LoaderPlan, name: str) -> None:
    run = plant("samplers.py", name)
    assert sampling.check_sampling(Subject(name), run, [plan]).findings == []


@given(plans, st.sampled_from(["every_rank_all", "own_seed_on_each_rank"]))
@DRAWN
def test_samples_seen_by_two_ranks_are_found(plan: LoaderPlan, name: str) -> None:
    assume(plan.num_ranks > 1 and plan.shuffle)
    assume(plan.num_samples >= 12 and plan.num_samples > 2 * plan.num_ranks * plan.batch_size)
    report = sampling.check_sampling(Subject(name), plant("samplers.py", name), [plan])
    assert sampling.ONCE in broken(report)


@given(plans)
@DRAWN
def test_an_order_that_a_resume_loses_is_found(plan: LoaderPlan) -> None:
    assume(plan.shuffle and plan.num_epochs > 1)
    assume(plan.num_samples >= 12 and plan.num_samples > 2 * plan.num_ranks * plan.batch_size)
    run = plant("samplers.py", "epoch_lost_by_resume")
    assert sampling.RESUMED in broken(sampling.check_sampling(Subject("wrong"), run, [plan]))


@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=40),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
@DRAWN
def test_any_lengths_are_divided_by_budget_rightly(
    drawn: Any, ranks: int, shuffle: Any, drop_last: Any
) -> None:
    plan = LoaderPlan(
        len(drawn), len(drawn), 0, ranks, shuffle=shuffle, drop_last=drop_last,
        lengths=tuple(drawn), tokens_per_batch=64,
    )  # fmt: skip
    run = plant("samplers.py", "right_budget")
    assert sampling.check_sampling(Subject("right"), run, [plan]).findings == []


micro_batches = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=3
)


@given(st.lists(micro_batches, min_size=1, max_size=2))
@FEW
def test_a_step_of_any_micro_batches_is_normalised_rightly(step: Any) -> None:
    right, wrong = (plant("steps.py", name) for name in ("right", "mean_of_means"))
    assert accumulation.check_accumulation(Subject("right"), right, [step]).findings == []
    report = accumulation.check_accumulation(Subject("wrong"), wrong, [step])
    # A mean of means is right where all weights are: count x micro-batches of the rank, alike.
    weights = {sum(rows) * len(rank) for rank in step for rows in rank}
    assert bool(report.findings) is (len(weights) > 1)


# Capitals, digits and letters of several bytes: no part of them is in the template.
texts = st.text(alphabet="ABCXYZ019 .?éß雪🙂", min_size=1, max_size=12).filter(str.strip)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    system = [Message(role="system", content=draw(texts))] if draw(st.booleans()) else []
    turns = [
        Message(role=role, content=draw(texts))
        for _ in range(draw(st.integers(1, 4)))
        for role in ("user", "assistant")
    ]
    return Conversation("drawn", (*system, *turns))


@given(conversations(), tokenizers, st.sampled_from(["right", "keeping_the_end", "dropping"]))
@DRAWN
def test_a_chat_of_any_texts_is_rendered_rightly(
    drawn: Conversation, tokenizer: Any, name: str
) -> None:
    render = plant("renders.py", name)
    for report in (
        chats.check_chat(Subject(name), render, [tokenizer], chats=lambda _: [drawn]),
        chats.check_labels(Subject(name), render, [tokenizer], chats=lambda _: [drawn]),
    ):
        assert report.findings == []
        assert report.untried == []


@given(conversations(), st.sampled_from([("all_learned", chats.OTHERS), ("end_masked", chats.END)]))
@DRAWN
def test_labels_that_are_wrong_are_found_in_any_chat(drawn: Conversation, bug: Any) -> None:
    name, breaks = bug
    report = chats.check_labels(
        Subject(name), plant("renders.py", name), [micro_tokenizer()], lambda _: [drawn]
    )
    assert breaks in broken(report)
