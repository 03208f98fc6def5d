from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay_smoke.matrix.rules import (
    AXES,
    FEATURES,
    Batches,
    Case,
    Checkpoint,
    Family,
    FeatureEntry,
    Framework,
    Interruption,
    Precision,
    case_of,
)

any_case = st.builds(
    Case,
    framework=st.sampled_from(get_args(Framework)),
    cards=st.integers(1, 4096),
    family=st.sampled_from(get_args(Family)),
    precision=st.sampled_from(get_args(Precision)),
    features=st.frozensets(st.sampled_from(list(FEATURES))),
    batches=st.sampled_from(get_args(Batches)),
    checkpoint=st.sampled_from(get_args(Checkpoint)),
    interruption=st.sampled_from(get_args(Interruption)),
)


@settings(deadline=None)
@given(any_case)
def test_an_id_is_parsed_back(case: Case) -> None:
    assert case_of(case.id) == case


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_other_text_is_an_error_or_an_id(text: str) -> None:
    with suppress(UsageError):
        assert case_of(text).id == text


@pytest.mark.parametrize(
    ("case", "case_id"),
    [
        (Case(framework="one-process", cards=1), "one-process-1"),
        (
            Case(framework="fsdp", cards=2, features=frozenset({"offload", "lora"})),
            "fsdp-2-lora-offload",
        ),
        (Case(framework="fsdp", cards=2, checkpoint="hugging-face"), "fsdp-2-hugging-face"),
        (
            Case(
                framework="zero3",
                cards=4,
                family="mixtral",
                precision="float16",
                features=frozenset({"compile", "accumulation"}),
                batches="packed",
                checkpoint="full",
                interruption="sigterm",
            ),
            "zero3-4-mixtral-float16-accumulation-compile-packed-full-sigterm",
        ),
    ],
)
def test_an_id_names_what_is_not_by_default(case: Case, case_id: str) -> None:
    assert case.id == case_id


@pytest.mark.parametrize(
    ("framework", "checkpoint"),
    [("one-process", "full"), ("ddp", "full"), ("fsdp", "sharded"), ("zero1", "sharded")],
)
def test_by_default_a_case_saves_what_its_framework_resumes_from(
    framework: Framework, checkpoint: str
) -> None:
    assert Case(framework=framework, cards=2).checkpoint == checkpoint


def test_features_are_written_in_one_order() -> None:
    case = Case(framework="fsdp", cards=2, features=frozenset({"compile", "offload", "lora"}))
    assert case.model_dump(mode="json")["features"] == ["lora", "offload", "compile"]
    assert Case.model_validate_json(case.model_dump_json()) == case


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("fsdp-2-lor", "fsdp-2-lora"),
        ("fspd-2", "fsdp-2"),
        ("fsdp-2-offload-lora", "fsdp-2-lora-offload"),
        ("fsdp-2-lora-lora", "fsdp-2-lora"),
        ("fsdp-2-llama", "fsdp-2"),
        ("fsdp-2-sharded", "fsdp-2"),
        ("fsdp-0", "fsdp-1"),
        ("fsdp", "fsdp-2"),
        ("", "zero3-2"),
    ],
)
def test_the_nearest_id_is_named(written: str, nearest: str) -> None:
    with pytest.raises(UsageError) as raised:
        case_of(written)
    assert str(raised.value).startswith(f"no case is called {written!r}: ")
    assert str(raised.value).endswith(f"; the nearest is {nearest}")
    assert case_of(nearest).id == nearest


def test_a_feature_without_an_effect_is_an_error() -> None:
    with pytest.raises(ValueError, match="'planted' changes nothing in a run"):
        FeatureEntry(meaning="planted")


def test_a_case_with_an_unknown_feature_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no feature 'warp'"):
        Case(framework="ddp", cards=2, features=frozenset({"warp"}))


def test_a_case_has_a_word_on_each_axis() -> None:
    features = dict.fromkeys(FEATURES, "no") | {"lora": "lora"}
    assert case_of("fsdp-2-lora-sigterm").words == {
        "framework": "fsdp", "cards": "2", "family": "llama", "precision": "float32",
        **features, "batches": "padded", "checkpoint": "sharded", "interruption": "sigterm",
    }  # fmt: skip


def test_every_feature_has_an_axis() -> None:
    words = {axis.name: axis.values for axis in AXES}
    assert {name: words[name] for name in FEATURES} == {name: ("no", name) for name in FEATURES}
