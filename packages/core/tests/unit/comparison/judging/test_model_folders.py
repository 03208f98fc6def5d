"""Two model folders: quantized weights and configurations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare, judge_weights
from assay.errors import UsageError
from assay.judge.explain import DecidingRows, explain_verdict
from assay.models.quantization.judging import (
    WeightComparison,
    WeightFault,
    WeightRegion,
    WeightResult,
)
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict, find_contradiction
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.models.quantization.rounding import (
    Fault,
    no_fault,
    times,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    write_folder,
)

NAME = "model.layers.3.mlp.down_proj.weight"
PLACE = WeightRegion(range(7, 8), tuple(range(128, 256)))
FINDING = WeightFault(NAME, "scale", 0.147, 0.098, PLACE, 1.1)


def result(*findings: WeightFault) -> WeightResult:
    return WeightResult(NAME, "model.safetensors", 64, 0.1, 0.098, 1.5, 0.05, findings)


def test_wrong_scale_fails_and_is_described() -> None:
    verdict, rows = judge_weights(WeightComparison((result(FINDING),), (FINDING,)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.headline == (
        "model.layers.3.mlp.down_proj.weight, row 7, columns 128-255: its scale is 1.1x the right one;"
        " relative error 0.147 = 1.5x the best that the format can reach (9.8e-2)."
    )
    assert verdict.location is not None
    assert (verdict.location.parameter, verdict.diagnosis) == (NAME, "weight-mismatch")
    assert [(row.module, row.port, row.ratio) for row in rows] == [
        ("model.layers.3.mlp.down_proj", "parameter.weight", 1.5)
    ]
    assert find_contradiction(verdict) is None


def test_sound_weights_pass_with_their_resolution() -> None:
    verdict, _ = judge_weights(WeightComparison((result(),), ()))
    assert (verdict.verdict, verdict.resolution) == (Outcome.PASS, 0.05)
    assert (
        verdict.headline == "The weights agree, as far as their formats allow: 1 weight, 64 groups."
    )
    unseen = f"an error of one scale below 5.0 % may be unseen (in {NAME})"
    assert verdict.levels["weights"].reason == unseen
    assert verdict.notes == [unseen]
    assert find_contradiction(verdict) is None


def test_missing_weight_is_not_a_pass() -> None:
    verdict, _ = judge_weights(
        WeightComparison((result(),), (), unmatched_expected=("lm_head.weight",))
    )
    assert verdict.verdict is Outcome.NOT_COMPARED


def test_nothing_compared_is_not_a_pass() -> None:
    verdict, _ = judge_weights(WeightComparison((), ()))
    assert (verdict.verdict, verdict.headline) == (
        Outcome.NOT_COMPARED,
        "Nothing could be compared.",
    )


def test_words_of_each_cause() -> None:
    other = WeightRegion(range(3), (0, 5))
    for cause, amount, partner, text in (
        ("zero-point", 1.0, None, "row 7, columns 128-255: its zero point is off by +1 steps"),
        ("swapped", 0.0, other, "it holds the values of rows 0-2, 2 columns from 0 to 5"),
        ("swapped-parameters", 0.0, other, "its scale and zero point are those of rows 0-2"),
        ("values", 0.0, None, "its values differ"),
    ):
        finding = WeightFault(NAME, cause, 1.4, 0.1, PLACE, amount, partner)  # type: ignore[arg-type]
        verdict, _ = judge_weights(WeightComparison((result(finding),), (finding,)))
        assert verdict.headline is not None
        assert text in verdict.headline
    stale = WeightFault("model-00002-of-00004.safetensors", "shard", 1.4, 0.1, None, 17)
    verdict, _ = judge_weights(WeightComparison((result(stale),), (stale,)))
    assert verdict.location is None
    assert verdict.headline == (
        "model-00002-of-00004.safetensors: 17 of its weights are other weights;"
        " relative error 1.4 = 14.0x the best that the format can reach (0.1)."
    )


def write_quantized(folder: Path, weight: Tensor, fault: Fault) -> Path:
    case = CASES["gptq4-64"]
    tensors, _ = case.write(weight, fault)
    return write_folder(folder, [{f"up.{key}": one for key, one in tensors.items()}], case.settings)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(no_fault, Outcome.PASS), (times(1.1, 3), Outcome.FAIL)]
)
def test_folder_of_float_weights_and_quantized_folder(
    fault: Fault, outcome: Outcome, tmp_path: Path
) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    expected = write_folder(tmp_path / "expected", [{"up.weight": weight}])
    actual = write_quantized(tmp_path / "actual", weight, fault)
    (tmp_path / "run").mkdir()
    verdict = compare(
        CompareOptions(str(expected), str(actual)), tmp_path / "run", SilentProgress()
    )
    assert verdict.verdict is outcome
    assert (tmp_path / "run" / "verdict.json").is_file()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "micro:llama"}, "--model"),
        ({"level": "logits"}, "--level"),
        ({"name_map": "names.toml"}, "--map"),
        ({"rank": 0}, "--rank"),
        ({"token_shift": 0}, "--token-shift"),
        ({"limits": "ascend"}, "--limits"),
        ({"stats": True}, "--stats"),
        ({"compat": True, "table": Path("x.csv")}, "--compat, a table as --output"),
        ({"table": Path("x.csv")}, "a table as --output"),
    ],
)
def test_options_that_quantized_weights_would_ignore_are_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    expected = write_folder(tmp_path / "expected", [{"up.weight": weight}])
    actual = write_quantized(tmp_path / "actual", weight, no_fault)
    with pytest.raises(UsageError) as caught:
        compare(CompareOptions(str(expected), str(actual), **options), tmp_path, SilentProgress())
    assert str(caught.value).endswith(f"leave out {named}")


def test_dump_with_weights_and_quantized_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 32, bias=False)
    network = nn.Sequential()
    network.add_module("up", linear)
    with torch.no_grad(), dumped(network, tmp_path / "dump", parameters=True):
        network(torch.ones(1, 256))
    weight = linear.weight.detach()
    actual = write_quantized(tmp_path / "actual", weight, times(1.1, 3))
    (tmp_path / "run").mkdir()
    verdict = compare(
        CompareOptions(str(tmp_path / "dump"), str(actual)), tmp_path / "run", SilentProgress()
    )
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.parameter == "up.weight"


def test_an_element_of_a_vector_is_named_by_its_number(tmp_path: Path) -> None:
    verdict = compared(tmp_path, {}, {}, norm=torch.tensor([1.0, 1.0, 1.5, 1.0]))
    assert verdict.headline == (
        "model.norm.weight differs in 1 of 4 values, most at element 2: 1.5, expected 1.0."
    )


def test_two_folders_of_an_unknown_method_are_compared_as_stored(tmp_path: Path) -> None:
    settings = {"quant_method": "aqlm"}
    for name, value in (("expected", 1), ("same", 1), ("other", 2)):
        stored = {"up.codes": torch.full((4, 4), value, dtype=torch.int32)}
        write_folder(tmp_path / name, [stored], settings)
    for name, outcome in (("same", Outcome.PASS), ("other", Outcome.FAIL)):
        (tmp_path / f"run-{name}").mkdir()
        comparison = CompareOptions(str(tmp_path / "expected"), str(tmp_path / name))
        assert compare(comparison, tmp_path / f"run-{name}", SilentProgress()).verdict is outcome


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 16,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 2,
    "torch_dtype": "float32", "transformers_version": "4.40.0", "head_dim": 4,
}  # fmt: skip
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


NORM = torch.ones(4)
REMOVED = object()


def compared(
    folder: Path, first: dict[str, Any], second: dict[str, Any], norm: torch.Tensor = NORM
) -> Verdict:
    """Compare two folders with LLAMA and these changes; REMOVED removes a key. norm: the second one's."""
    for name, changes, weight in (("a", first, NORM), ("b", second, norm)):
        (folder / name).mkdir()
        config = {key: value for key, value in (LLAMA | changes).items() if value is not REMOVED}
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({"model.norm.weight": weight.clone()}, folder / name / "model.safetensors")
    (folder / "out").mkdir()
    options = CompareOptions(str(folder / "a"), str(folder / "b"))
    verdict = compare(options, folder / "out", SilentProgress())
    assert find_contradiction(verdict) is None
    return verdict


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rope_theta": 5e5}, "rope_parameters.rope_theta is 10000.0 in EXPECTED, 500000.0 in ACTUAL"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-06 in EXPECTED, 1e-05 in ACTUAL"),
        ({"rms_norm_eps": REMOVED, "rope_theta": 1e4, "hidden_act": "gelu"}, "hidden_act is silu in EXPECTED, gelu in ACTUAL"),
        ({"num_attention_heads": 1}, "num_attention_heads is 2 in EXPECTED, 1 in ACTUAL"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.factor is absent in EXPECTED, 2.0 in ACTUAL"),
        (DYNAMIC, "rope_parameters.factor is absent in EXPECTED, 2.0 in ACTUAL"),
    ],
)  # fmt: skip
def test_a_key_that_changes_results_fails(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    verdict = compared(tmp_path, {}, changes)
    assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "checkpoint-mismatch")
    assert f"config.json: {text}" in (verdict.levels["config"].reason or "")
    assert verdict.headline is not None
    assert verdict.headline.startswith("The configurations differ: config.json: ")
    assert "inputs" not in verdict.levels
    summary = explain_verdict(verdict, DecidingRows()).details[-1]
    assert (
        summary == "diagnosis checkpoint-mismatch: the configuration is not that of the other model"
    )


def test_a_removed_null_fails_where_the_default_is_another_value(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    verdict = compared(tmp_path, mistral | {"sliding_window": None}, mistral)
    text = "config.json: sliding_window is None in EXPECTED, 4096 in ACTUAL"
    assert (verdict.verdict, verdict.levels["config"].reason) == (Outcome.FAIL, text)


def test_a_length_fails_where_rotary_frequencies_depend_on_it(tmp_path: Path) -> None:
    verdict = compared(tmp_path, DYNAMIC, DYNAMIC | {"max_position_embeddings": 128})
    text = "config.json: max_position_embeddings is 512 in EXPECTED, 128 in ACTUAL"
    assert (verdict.verdict, verdict.levels["config"].reason) == (Outcome.FAIL, text)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_position_embeddings": 128}, "max_position_embeddings"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ],
)
def test_a_key_that_may_change_results_is_not_compared(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    verdict = compared(tmp_path, {}, changes)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert f"config.json: {key} is " in (verdict.levels["config"].reason or "")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"eos_token_id": [2, 3]}),
        ({}, {"attention_dropout": 0.1}),
        ({}, {"initializer_range": 0.5}),
    ],
)
def test_a_key_that_changes_no_result_is_a_note(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    verdict = compared(tmp_path, first, second)
    [(key, value)] = second.items()
    assert (verdict.verdict, "config" in verdict.levels) == (Outcome.PASS, False)
    [note] = [one for one in verdict.notes if one.startswith(f"config.json: {key} is ")]
    assert note.endswith(f"{value} in ACTUAL")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rope_theta": REMOVED}, {}),  # the default of the class
        (
            {},
            {"rope_theta": REMOVED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        ({}, {"torch_dtype": REMOVED, "dtype": "bfloat16", "transformers_version": "5.23.0"}),
        ({}, {"head_dim": None, "attention_bias": False}),
    ],
)
def test_other_forms_of_one_configuration_agree(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    verdict = compared(tmp_path, first, second)
    assert (verdict.verdict, "config" in verdict.levels) == (Outcome.PASS, False)
    assert not [one for one in verdict.notes if one.startswith("config.json")]


def test_keys_of_a_model_type_that_transformers_lacks_are_compared_as_they_are(
    tmp_path: Path,
) -> None:
    own = {"model_type": "of-tomorrow"}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    other = compared(tmp_path / "one", own, own | {"rms_norm_eps": 1e-5})
    assert other.verdict is Outcome.FAIL
    lacking = compared(tmp_path / "two", own, own | {"rms_norm_eps": REMOVED})
    assert lacking.verdict is Outcome.NOT_COMPARED


EMBEDDING = torch.arange(128.0).reshape(16, 8)


def compared_heads(
    folder: Path, *heads: torch.Tensor | None, is_tied: Sequence[bool | None] = (True, False)
) -> Verdict:
    """Compare two folders with the same embedding and these heads."""
    for name, head, tied in zip("ab", heads, is_tied, strict=True):
        (folder / name).mkdir(parents=True)
        config = LLAMA if tied is None else LLAMA | {"tie_word_embeddings": tied}
        (folder / name / "config.json").write_text(json.dumps(config))
        weights = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": head}
        held = {key: value for key, value in weights.items() if value is not None}
        save_file(held, folder / name / "model.safetensors")
    (folder / "out").mkdir()
    options = CompareOptions(str(folder / "a"), str(folder / "b"))
    return compare(options, folder / "out", SilentProgress())


def test_a_head_is_compared_with_the_embedding_that_the_other_side_shares(tmp_path: Path) -> None:
    equal = compared_heads(tmp_path / "1", None, EMBEDDING.clone())
    assert (equal.verdict, equal.compared) == (Outcome.PASS, 2)
    assert equal.notes == ["config.json: tie_word_embeddings is True in EXPECTED, False in ACTUAL"]
    for number, heads in (("2", (None, 2 * EMBEDDING)), ("3", (2 * EMBEDDING, None))):
        is_tied = tuple(one is None for one in heads)
        verdict = compared_heads(tmp_path / number, *heads, is_tied=is_tied)
        assert (verdict.verdict, verdict.diagnosis) == (Outcome.FAIL, "weight-mismatch")
        assert verdict.location is not None
        assert verdict.location.parameter == "lm_head.weight"


def test_a_missing_head_of_a_model_that_does_not_share_it_is_not_compared(tmp_path: Path) -> None:
    """The class of this model shares no weights by default."""
    verdict = compared_heads(tmp_path, EMBEDDING.clone(), None, is_tied=(False, None))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == ["lm_head:parameter.weight"]


def test_a_stored_head_that_is_not_loaded_fails(tmp_path: Path) -> None:
    """Both folders store the same head, and one of the models uses its embedding instead."""
    head = 2 * EMBEDDING
    verdict = compared_heads(tmp_path, head, head.clone())
    assert verdict.verdict is Outcome.FAIL
    assert "tie_word_embeddings" in str(verdict.headline)
