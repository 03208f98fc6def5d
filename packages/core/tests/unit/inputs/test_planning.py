import dataclasses

import pytest

from assay.errors import UsageError
from assay.inputs import (
    Batch,
    BatchOptions,
    InputPlan,
    InsertedMedia,
    LengthRange,
    Media,
    ModelLimits,
    Prompt,
    describe_hard_cases,
    insert_media,
    parse_lengths,
    plan_batches,
)

LIMITS = ModelLimits(vocab_size=260, max_positions=2048, sliding_window=32, pad_token_id=258)


def encode(text: str) -> list[int]:
    return [256, *text.encode()]


def plan(limits: ModelLimits = LIMITS, **options: object) -> InputPlan:
    return plan_batches(limits, BatchOptions(**options), encode)  # type: ignore[arg-type]


def lengths_of(planned: InputPlan) -> list[list[int]]:
    return [[len(row) for row in batch.rows] for batch in planned.batches]


def test_texts_next_to_images_end_with_the_end_token() -> None:
    limits = dataclasses.replace(
        LIMITS, can_generate=False, media=(Media("pixel_values", (1, 3, 8, 8)),), end_token_id=259
    )

    planned = plan(limits)

    rows = [row for batch in planned.batches for row in batch.rows]
    assert {row[-1] for row in rows} == {259}
    assert [len(batch.media) for batch in planned.batches] == [4, 4, 1]
    seeds = [one.seed for batch in planned.batches for (one,) in batch.media]
    assert len({*seeds}) == len(rows)


def test_every_second_batch_has_the_optional_tensors() -> None:
    limits = dataclasses.replace(
        LIMITS,
        can_generate=False,
        optional=(
            Media("encoder_hidden_states", (1, 6, 8)),
            Media("global_attention_mask", (1,), numbers=(1,), layout="token"),
        ),
    )

    planned = plan(limits)

    assert [len(batch.media) for batch in planned.batches] == [4, 0, 0]
    inputs = planned.batches[0].inputs
    assert inputs["encoder_hidden_states"].shape == (4, 6, 8)
    lengths = inputs["attention_mask"].sum(1).tolist()
    # The first token of each row, which is padded on the right.
    assert inputs["global_attention_mask"].tolist() == [[1] + [0] * (max(lengths) - 1)] * 4
    assert any("without which a part of the model never runs" in one for one in planned.notes)


def test_optional_tensors_replace_those_of_the_other_batches() -> None:
    image, points = Media("pixel_values", (1, 3, 8, 8)), Media("input_points", (1, 1, 4, 2))
    limits = ModelLimits(0, media=(image,), optional=(image, points), has_tokens=False)

    planned = plan(limits)

    assert [[*batch.inputs] for batch in planned.batches] == [
        ["pixel_values", "input_points"],
        ["pixel_values"],
    ]
    assert any("has input_points, without" in one for one in planned.notes)


def test_images_alone_have_batches_without_ids() -> None:
    limits = ModelLimits(
        vocab_size=0,
        can_generate=False,
        media=(Media("pixel_values", (1, 3, 8, 8)),),
        has_tokens=False,
    )

    planned = plan(limits)

    assert [batch.rows for batch in planned.batches] == [((),) * 4] * 2
    assert [batch.prompts for batch in planned.batches] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_defaults_are_two_batches_of_four_and_a_long_prompt_in_chunks() -> None:
    planned = plan()
    assert [len(batch.rows) for batch in planned.batches] == [4, 4, 1]
    assert [batch.max_new_tokens for batch in planned.batches] == [32, 32, 4]
    assert [batch.prefill_chunk for batch in planned.batches] == [None, None, 256]
    assert lengths_of(planned)[2] == [1040]
    assert all(32 <= length <= 96 for batch in lengths_of(planned)[:2] for length in batch)
    assert planned.notes == ()


def test_texts_whose_padding_would_be_read_are_batches_of_their_own() -> None:
    planned = plan(dataclasses.replace(LIMITS, reads_padding=True))

    assert [len(batch.rows) for batch in planned.batches] == [1] * 9
    assert planned.notes == (
        "each text is a batch of its own: padding changes the results of this model",
    )


def test_prompts_are_numbered_over_all_batches() -> None:
    planned = plan(num_prompts=5, batch_size=2)
    assert [batch.number for batch in planned.batches] == [0, 1, 2, 3]
    assert [batch.prompts for batch in planned.batches] == [(0, 1), (2, 3), (4,), (5,)]
    rows = [row for batch in planned.batches for row in batch.rows]
    assert rows == [prompt.ids for prompt in planned.prompts]


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_of_a_range_has_unequal_lengths(seed: int) -> None:
    planned = plan(seed=seed, batch_size=2, lengths=LengthRange(40, 41))
    for batch in lengths_of(planned)[:-1]:
        assert sorted(batch) == [40, 41] or len(set(batch)) == 2


def test_fixed_length_is_kept_in_all_prompts() -> None:
    assert lengths_of(plan(lengths=LengthRange(64, 64))) == [[64] * 4] * 2


def test_seed_decides_texts_and_lengths() -> None:
    assert plan(seed=3) == plan(seed=3)
    assert plan(seed=3).content_hash != plan(seed=4).content_hash


def test_only_the_first_token_of_a_joined_prompt_begins_a_text() -> None:
    long_ids = plan().batches[-1].rows[0]
    assert long_ids[0] == 256
    assert 256 not in long_ids[1:]


def test_wider_window_makes_the_long_prompt_longer() -> None:
    limits = dataclasses.replace(LIMITS, sliding_window=1500)
    assert lengths_of(plan(limits))[-1] == [1516]


def test_window_too_wide_to_exceed_is_noted() -> None:
    limits = ModelLimits(vocab_size=260, sliding_window=4096)
    planned = plan(limits)
    assert lengths_of(planned)[-1] == [1040]
    assert planned.notes == ("no prompt is longer than the sliding window of 4096",)


def test_short_context_cuts_the_prompts_and_is_noted() -> None:
    planned = plan(ModelLimits(vocab_size=260, max_positions=64))
    assert lengths_of(planned) == [[32] * 4, [32] * 4, [60]]
    assert planned.batches[-1].prefill_chunk is None
    assert planned.notes == (
        "prompts are cut to 32 tokens: the model's context is 64, 32 of it for new tokens",
        "the long prompt has 60 instead of 1040 tokens: the model's context is 64",
    )


def test_context_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="32 new tokens leave no room"):
        plan(ModelLimits(vocab_size=260, max_positions=32))


def test_model_that_generates_nothing_gets_no_new_tokens_and_no_chunks() -> None:
    planned = plan(dataclasses.replace(LIMITS, can_generate=False))
    assert {batch.max_new_tokens for batch in planned.batches} == {0}
    assert {batch.prefill_chunk for batch in planned.batches} == {None}
    assert lengths_of(planned)[-1] == [1040]


def test_given_prompts_are_taken_as_they_are() -> None:
    given = [Prompt(None, (1, 2, 3)), Prompt(None, (4,)), Prompt(None, (5, 6))]
    planned = plan_batches(LIMITS, BatchOptions(batch_size=2), encode, given)
    assert [batch.rows for batch in planned.batches] == [((1, 2, 3), (4,)), ((5, 6),)]
    assert planned.prompts == tuple(given)


def test_given_prompts_are_cut_to_lengths_that_are_asked_for() -> None:
    given = [Prompt(None, tuple(range(10))), Prompt(None, (1, 2))]
    options = BatchOptions(lengths=LengthRange(4, 4))
    planned = plan_batches(LIMITS, options, encode, given)
    assert planned.batches[0].rows == ((0, 1, 2, 3), (1, 2))


def test_given_prompts_must_fit_the_model() -> None:
    options = BatchOptions()
    with pytest.raises(UsageError, match="prompt 1: token id 260 at position 0 is outside"):
        plan_batches(LIMITS, options, encode, [Prompt(None, (1,)), Prompt(None, (260,))])
    with pytest.raises(UsageError, match="prompt 0: 2017 tokens and 32 new ones are over"):
        plan_batches(LIMITS, options, encode, [Prompt(None, (1,) * 2017)])


def test_vocabulary_too_small_for_the_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match="outside the vocabulary of 200"):
        plan(ModelLimits(vocab_size=200))


@pytest.mark.parametrize(
    "options",
    [BatchOptions(batch_size=0), BatchOptions(max_new_tokens=-1), BatchOptions(num_prompts=0)],
)
def test_options_without_meaning_are_refused(options: BatchOptions) -> None:
    with pytest.raises(UsageError, match="must be at least"):
        plan_batches(LIMITS, options, encode)


@pytest.mark.parametrize(
    ("text", "expected"), [("64", LengthRange(64, 64)), ("32:96", LengthRange(32, 96))]
)
def test_lengths_are_a_number_or_a_range(text: str, expected: LengthRange) -> None:
    assert parse_lengths(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "96:32", "32:", ":96", "-1", "1.5", "1:2:3"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="prompt length"):
        parse_lengths(text)


def test_long_prompt_is_read_in_one_piece_where_generation_has_no_cache_for_chunks() -> None:
    limits = dataclasses.replace(LIMITS, whole_prefill="there is no cache")

    planned = plan(limits)

    assert planned.batches[-1].length == 1040
    assert planned.batches[-1].prefill_chunk is None
    assert planned.notes == ("no prompt is read in chunks: there is no cache",)
    assert describe_hard_cases(planned.batches, limits)["chunked prefill"] is None


PAD = "padding"
WINDOW = "sequence longer than the sliding window"
FAR = "positions over 1,000"
CHUNKS = "chunked prefill"
DECODE = "decode with a cache"


def batch(*lengths: int, new_tokens: int = 0, chunk: int | None = None) -> Batch:
    rows = tuple((1,) * length for length in lengths)
    return Batch(0, rows, tuple(range(len(rows))), 0, new_tokens, chunk)


def test_defaults_cover_every_case() -> None:
    plan = plan_batches(LIMITS, BatchOptions(), lambda text: list(text.encode()))
    assert describe_hard_cases(plan.batches, LIMITS) == dict.fromkeys(
        (PAD, WINDOW, FAR, CHUNKS, DECODE), True
    )


def test_one_short_prompt_covers_no_case() -> None:
    assert describe_hard_cases([batch(5)], LIMITS) == dict.fromkeys(
        (PAD, WINDOW, FAR, CHUNKS, DECODE), False
    )


@pytest.mark.parametrize(
    ("case", "short", "reaching"),
    [
        (PAD, batch(5, 5), batch(5, 6)),
        (WINDOW, batch(32), batch(33)),
        (WINDOW, batch(20, new_tokens=13), batch(20, new_tokens=14)),
        (FAR, batch(1001), batch(1002)),
        (CHUNKS, batch(256, chunk=256), batch(257, chunk=256)),
        (DECODE, batch(5, new_tokens=1), batch(5, new_tokens=2)),
    ],
)
def test_case_is_reached_from_its_first_token_on(case: str, short: Batch, reaching: Batch) -> None:
    assert describe_hard_cases([short], LIMITS)[case] is False
    assert describe_hard_cases([short, reaching], LIMITS)[case] is True


def test_case_that_cannot_occur_in_the_model_is_none() -> None:
    limits = ModelLimits(vocab_size=260, max_positions=1001, can_generate=False)
    reach = describe_hard_cases([batch(5, 6)], limits)
    assert reach == {PAD: True, WINDOW: None, FAR: None, CHUNKS: None, DECODE: None}


IMAGES = tuple(
    InsertedMedia((Media("pixel_values", (1, size)),), (90, *[91] * size, 92)) for size in (2, 3)
)
WITH_IMAGES = dataclasses.replace(LIMITS, images=IMAGES, placeholders=(91,))


def test_texts_hold_images_of_several_sizes_at_several_places() -> None:
    batch = Batch(0, ((1, 2, 3, 4), (5, 6)), (0, 1), 0, 4)

    found = insert_media(batch, WITH_IMAGES, 0, ((0.0, 0.5), ()))

    assert found.rows == ((90, 91, 91, 92, 1, 2, 90, 91, 91, 91, 92, 3, 4), (5, 6))
    assert [[one.shape for one in row] for row in found.media] == [[(1, 2), (1, 3)], []]
    first, second = found.media[0]
    assert first.seed != second.seed


def test_text_keeps_a_token_next_to_its_images() -> None:
    limits = dataclasses.replace(WITH_IMAGES, max_positions=11)
    batch = Batch(0, ((1, 2, 3, 4),), (0,), 0, 4)

    found = insert_media(batch, limits, 0, ((0.0, 0.5),))

    assert found.rows == ((90, 91, 91, 92, 1, 2, 3),)
    assert [one.shape for row in found.media for one in row] == [(1, 2)]


def test_every_batch_has_a_text_without_an_image_and_no_seed_twice() -> None:
    planned = plan(WITH_IMAGES)

    assert [[len(row) for row in batch.media] for batch in planned.batches] == [
        [1, 0, 2, 1],
        [1, 0, 2, 1],
        [],
    ]
    seeds = [one.seed for batch in planned.batches for row in batch.media for one in row]
    assert len({*seeds}) == len(seeds)


def test_long_text_has_an_image_if_the_model_needs_one() -> None:
    planned = plan(dataclasses.replace(WITH_IMAGES, needs_image=True))

    assert [len(row) for row in planned.batches[-1].media] == [1]


def test_given_prompts_hold_no_media() -> None:
    planned = plan_batches(WITH_IMAGES, BatchOptions(), encode, [Prompt("a", (1, 2))])

    assert planned.batches[0].media == ()


def test_tokens_of_images_are_marked_and_see_the_last_image() -> None:
    of_image = (
        Media("pixel_values", (1, 2)),
        Media("aspect_ratio_mask", (1, 2), numbers=(1,), extent=(1, 1), layout="row"),
    )
    limits = dataclasses.replace(
        WITH_IMAGES,
        images=(InsertedMedia(of_image, (91,)),),
        marked_in=("types",),
        seen_in="seen",
    )
    batch = Batch(0, ((1, 2), (3,)), (0, 1), 0, 4)

    found = insert_media(batch, limits, 0, ((0.5, 1.0), ())).inputs

    assert found["input_ids"].tolist() == [[1, 91, 2, 91], [0, 0, 0, 3]]
    assert found["types"].tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    # (B, T, images, tiles): the second tile of each image is padding.
    assert found["seen"][..., 0].tolist() == [
        [[0, 0], [1, 0], [1, 0], [0, 1]],
        [[0, 0]] * 4,
    ]
    assert not found["seen"][..., 1].any()


@pytest.mark.parametrize(
    ("places", "expected"),
    [(((), ()), [False, False]), (((0.5,), (0.5,)), [True, False]), (((0.5,), ()), [True, True])],
)
def test_missing_images_are_a_hard_case(
    places: tuple[tuple[float, ...], ...], expected: list[bool]
) -> None:
    found = insert_media(batch(5, 6, new_tokens=1), WITH_IMAGES, 0, places)

    reach = describe_hard_cases([found], WITH_IMAGES)

    assert [reach["an image or a sound in a text"]] == expected[:1]
    assert [reach["a text without one in the batch of a text with one"]] == expected[1:]
