"""Batches as data and as tensors."""

import dataclasses
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from assay.errors import UsageError
from assay.inputs import (
    Batch,
    InputPlan,
    Media,
    ModelLimits,
    Prompt,
    built_in_texts,
    join_media,
    limits_of,
    load_prompts,
)

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


@dataclass
class Model:
    config: SimpleNamespace = field(default_factory=SimpleNamespace)
    vocab_size: int = 260
    max_positions: int | None = 2048
    pad_token_id: int = 258
    can_generate: bool = True
    decoder_start: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    media_input: str = ""


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({}, None),
        ({"sliding_window": None}, None),
        ({"sliding_window": 32}, 32),
        ({"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, 32),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 32, "use_sliding_window": False}, None),
        ({"sliding_window": 32, "use_sliding_window": True}, 32),
    ],
)
def test_window_counts_where_a_layer_uses_it(
    settings: dict[str, object], window: int | None
) -> None:
    assert limits_of(Model(SimpleNamespace(**settings))).sliding_window == window


class ConfigOfLayers(SimpleNamespace):
    """A configuration whose layers have different windows, and which refuses to name one for all."""

    is_heterogeneous = True
    per_layer_config = tuple(SimpleNamespace(sliding_window=one) for one in (256, None, 64))

    @property
    def sliding_window(self) -> int:
        raise RuntimeError("'sliding_window' is a per-layer attribute")


def test_window_of_different_layers_is_the_shortest() -> None:
    assert limits_of(Model(ConfigOfLayers())).sliding_window == 64


def test_other_limits_are_those_of_the_model() -> None:
    limits = limits_of(Model(max_positions=None, can_generate=False))
    assert (limits.vocab_size, limits.max_positions) == (260, None)
    assert (limits.pad_token_id, limits.can_generate) == (258, False)


LIMITS = ModelLimits(vocab_size=260, max_positions=20, pad_token_id=258)


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_chat(messages: Sequence[Mapping[str, str]]) -> list[int]:
    return [256, *encode("".join(message["content"] for message in messages)), 257]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], list[Prompt]]:
    def load_text(text: str) -> list[Prompt]:
        file = tmp_path / "prompts.jsonl"
        file.write_text(text, encoding="utf-8")
        return load_prompts(file, encode, LIMITS, max_new_tokens=4)

    return load_text


def test_prompts_are_texts_or_ids(load: Callable[[str], list[Prompt]]) -> None:
    lines = '{"prompt": "ab"}\n\n{"text": "é", "source": "x"}\n{"ids": [0, 259]}\n'
    assert load(lines) == [
        Prompt("ab", (97, 98)),
        Prompt("é", (0xC3, 0xA9)),
        Prompt(None, (0, 259)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON: "),
        ("[1, 2]", "2: not a JSON object"),
        ('{"question": "a"}', "2: needs an object with one of the keys"),
        ('{"prompt": "a", "ids": [1]}', "2: needs an object with one of the keys"),
        ('{"prompt": 3}', "2: prompt must be a string, not int"),
        ('{"prompt": ""}', "2: the prompt is empty"),
        ('{"ids": []}', "2: the prompt is empty"),
        ('{"ids": [1.5]}', "2: ids must be a list of whole numbers"),
        ('{"ids": [true]}', "2: ids must be a list of whole numbers"),
        ('{"ids": "1 2"}', "2: ids must be a list of whole numbers"),
        ('{"ids": [7, 260]}', "2: token id 260 at position 1 is outside the vocabulary of 260"),
        ('{"ids": [-1]}', "2: token id -1 at position 0 is outside the vocabulary of 260"),
        (
            '{"prompt": "seventeen letters"}',
            "2: 17 tokens and 4 new ones are over the model's context of 20",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "2: messages need --chat"),
    ],
)
def test_bad_line_is_named(
    load: Callable[[str], list[Prompt]], tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load('{"prompt": "fine"}\n' + line)
    assert str(caught.value).startswith(f"{tmp_path / 'prompts.jsonl'}, line {message}")


def test_prompt_that_just_fits_the_context_is_taken(load: Callable[[str], list[Prompt]]) -> None:
    assert len(load('{"prompt": "sixteen letters!"}')[0].ids) == 16


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_refused(load: Callable[[str], list[Prompt]], text: str) -> None:
    with pytest.raises(UsageError, match="the file is empty"):
        load(text)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UsageError, match=r"it is a folder|cannot be read"):
            load_prompts(path, encode, LIMITS, max_new_tokens=4)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match=r"latin\.jsonl, line 1: not UTF-8"):
        load_prompts(latin, encode, LIMITS, max_new_tokens=4)


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "p"}\n')
    prompts = load_prompts(file, encode, LIMITS, max_new_tokens=4, encode_chat=encode_chat)
    assert prompts == [Prompt("u", (256, 115, 117, 257)), Prompt("p", (256, 112, 257))]


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], [{"role": "user"}]])
def test_messages_need_roles_and_contents(tmp_path: Path, messages: object) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(UsageError, match="message"):
        load_prompts(file, encode, LIMITS, max_new_tokens=4, encode_chat=encode_chat)


def test_built_in_set_is_varied() -> None:
    texts = built_in_texts()
    assert len(set(texts)) == len(texts) >= 24
    scripts = {
        unicodedata.name(character).split()[0]
        for text in texts
        for character in text
        if character.isalpha()
    }
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK", "HANGUL"} <= scripts
    joined = "".join(texts)
    assert any(ord(character) > 0x1F300 for character in joined)
    assert any(text.startswith("def ") for text in texts)
    assert any(sum(map(str.isdigit, text)) > len(text) / 3 for text in texts)


def test_batch_of_an_encoder_is_padded_on_the_right_and_its_decoder_has_first_ids() -> None:
    batch = Batch(0, ((5, 6), (7, 8, 9)), (0, 1), 259, 4, decoder_start=(2,))

    assert batch.input_ids.tolist() == [[5, 6, 259], [7, 8, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.decoder_input_ids is not None
    assert batch.decoder_input_ids.tolist() == [[2], [2]]
    # The first new token follows the prompt and the first id of the decoder.
    assert [batch.first_new_position(row) for row in range(2)] == [3, 4]


def test_batch_without_an_encoder_has_no_ids_of_a_decoder() -> None:
    batch = Batch(0, ((5, 6), (7, 8, 9)), (0, 1), 259, 4)

    assert batch.decoder_input_ids is None
    assert batch.first_new_position(1) == 3


def test_values_of_an_image_are_exact_in_every_dtype() -> None:
    values = Media("pixel_values", (1, 3, 4, 4), seed=7).values

    assert values.shape == (1, 3, 4, 4)
    assert len(values.unique()) > 10
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(values.to(dtype).float(), values)


def test_text_next_to_an_image_is_padded_on_the_right() -> None:
    media = tuple((Media("pixel_values", (1, 1, 2, 2), seed),) for seed in (1, 2))
    batch = Batch(0, ((5,), (6, 7)), (0, 1), 0, 0, media=media)

    assert {*batch.inputs} == {"input_ids", "attention_mask", "pixel_values"}
    assert batch.input_ids.tolist() == [[5, 0], [6, 7]]


def test_images_follow_from_their_seeds() -> None:
    media = tuple((Media("pixel_values", (1, 1, 2, 2), seed),) for seed in (1, 2))
    batch = Batch(0, ((), ()), (0, 1), 0, 0, media=media)

    (name,) = batch.inputs
    images = batch.inputs[name]

    assert (name, images.shape) == ("pixel_values", (2, 1, 2, 2))
    assert torch.equal(images, batch.inputs[name])
    assert not torch.equal(images[0], images[1])


def test_images_of_a_strip_lie_side_by_side() -> None:
    media = tuple(
        (Media("pixel_values", (1, 3, 2, width), width, layout="strip"),) for width in (12, 8)
    )
    batch = Batch(0, ((5,), (6,)), (0, 1), 0, 0, media=media)

    strip = batch.inputs["pixel_values"]

    assert strip.shape == (1, 3, 2, 20)
    for (one,), part in zip(media, strip.split([12, 8], dim=-1), strict=True):
        assert torch.equal(one.values, part)


def test_rows_of_images_are_padded_with_zeros() -> None:
    wide = Media("pixel_values", (1, 2, 3), numbers=(7,), layout="row")
    high = Media("pixel_values", (1, 4, 1), numbers=(8,), layout="row")

    values = join_media([(wide, high), (), (high,)])["pixel_values"]

    assert values.shape == (3, 2, 4, 3)
    assert values[0, 0].tolist() == [[7, 7, 7], [7, 7, 7], [0, 0, 0], [0, 0, 0]]
    assert torch.equal(values[0, 1], values[2, 0])
    assert values[0, 1].tolist() == [[8, 0, 0]] * 4
    assert not values[1].any()
    assert not values[2, 1].any()


def test_patches_of_all_rows_follow_each_other() -> None:
    rows = [
        (Media("grid", (1, 3), numbers=(1, 2, 3)),),
        (),
        (Media("grid", (1, 3), numbers=(4, 5, 6)),),
    ]

    assert join_media(rows)["grid"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_values_of_tokens_are_padded_like_the_tokens() -> None:
    def mark(*numbers: int) -> Media:
        return Media("types", (len(numbers),), numbers=numbers, layout="token")

    batch = Batch(0, ((5,), (9, 9, 6)), (0, 1), 0, 1, media=((mark(3),), (mark(1, 1, 0),)))

    assert batch.input_ids.tolist() == [[0, 0, 5], [9, 9, 6]]
    assert batch.inputs["types"].tolist() == [[0, 0, 3], [1, 1, 0]]
    assert not batch.holds_media
    # A later token has zeros.
    longer = dataclasses.replace(batch, rows=((5, 7), (9, 9, 6, 8)))
    assert longer.inputs["types"].tolist() == [[0, 0, 3, 0], [1, 1, 0, 0]]


def test_part_of_an_image_is_followed_by_zeros() -> None:
    values = Media("pixel_values", (1, 2, 2), extent=(1, 2, 1), seed=3).values

    assert values[..., 0].all()
    assert not values[..., 1].any()


def test_given_tensors_are_kept_apart_from_the_record() -> None:
    media = Media.of_tensor("pixel_values", torch.tensor([[1.5, 2.5]]))
    plan = InputPlan((dataclasses.replace(BATCH, media=((media,), ())),), ())

    record = json.loads(json.dumps(plan.to_json()))
    found = InputPlan.from_json(record, plan.tensors)

    assert found.batches[0].inputs["pixel_values"].tolist() == [[1.5, 2.5]]
    assert found.content_hash == plan.content_hash
    other = Media.of_tensor("pixel_values", torch.tensor([[1.5, 2.6]]))
    changed = InputPlan((dataclasses.replace(BATCH, media=((other,), ())),), ())
    assert changed.content_hash != plan.content_hash


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "images": "a.png"}', "images must be a list of files"),
        ('{"prompt": "a", "images": ["none.png"]}', r"images: .*none\.png does not exist"),
        ('{"ids": [1], "images": ["a.png"]}', "images go with text, not with ids"),
    ],
)
def test_broken_images_of_a_prompt_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)

    with pytest.raises(UsageError, match=f"line 1: {message}"):
        load_prompts(path, list, ModelLimits(300), max_new_tokens=1)  # type: ignore[arg-type]


def test_an_expectation_stands_for_its_recorded_tokens(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    for content in (
        {"prompts": [[1, 2], [3]], "chats": [[]]},
        {"prompts": [], "inputs": [[1, 2], [3]]},
    ):
        file.write_text(json.dumps(content, indent=1))
        prompts = load_prompts(file, encode, LIMITS, max_new_tokens=4)
        assert [prompt.ids for prompt in prompts] == [(1, 2), (3,)]
    file.write_text('{\n "prompts": [["a"]]\n}')
    with pytest.raises(UsageError, match=r"e\.json, prompt 0: ids must be a list of whole numbers"):
        load_prompts(file, encode, LIMITS, max_new_tokens=4)
    file.write_text('{\n "question": "a"\n}')
    with pytest.raises(UsageError, match=r"needs one prompt a line, or an expectation with token"):
        load_prompts(file, encode, LIMITS, max_new_tokens=4)
