"""Settings of single modules: targets, overrides, and modules that are not quantized."""

from pathlib import Path
from typing import Any

import pytest

from assay.models.quantization.results import WeightComparison
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Fault,
    Tensors,
    no_fault,
    times,
)
from packages.core.tests.unit.models.quantization.test_comparing import (
    FAULTY,
    NAMES,
    make_weights,
    where,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)


def layers_of(settings: dict[str, Any], cases: dict[str, Case], folder: Path, fault: Fault = no_fault) -> WeightComparison:  # fmt: skip
    """Compare three modules, each written in the form of its own case, with `settings`."""
    weights, shard = make_weights(0), Tensors()
    for name, case in cases.items():
        stored, _ = case.write(weights[name], fault if f"{name}.weight" == FAULTY else no_fault)
        shard |= {f"{name}.{part}": one for part, one in stored.items()}
    expected = write_folder(folder / "e", [{f"{name}.weight": weights[name] for name in cases}])
    return compare_folders(expected, write_folder(folder / "a", [shard], settings))


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_most_specific_target_of_compressed_tensors_counts(
    is_reversed: bool, tmp_path: Path
) -> None:
    """Class, pattern and name; the last of two equal targets (compressed-tensors 0.20)."""
    forms = [
        (["Linear"], CASES["compressed-int8-channel-zeros"]),
        (["re:.*down_proj"], CASES["compressed-pack4-group"]),
        ([NAMES[2]], CASES["compressed-int8-group"]),
    ]
    weights = [one.settings["config_groups"]["group_0"]["weights"] for _, one in forms]
    listed = [{"targets": t, "weights": w} for (t, _), w in zip(forms, weights, strict=True)]
    if is_reversed:
        listed.reverse()
    else:
        listed.insert(0, {"targets": ["Linear"], "weights": weights[2]})
    groups = {f"group_{number}": one for number, one in enumerate(listed)}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    cases = {name: case for name, (_, case) in zip(NAMES, forms, strict=True)}
    assert not layers_of(settings, cases, tmp_path / "sound").findings
    [finding] = layers_of(settings, cases, tmp_path / "wrong", times(1.1, 3)).findings
    assert (finding.weight, where(finding.place)) == (FAULTY, (0, 192))


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("dynamic", r"+:.*\.0\.mlp\.down_proj"),
        ("dynamic", r".*down_proj"),
        ("extra_config", NAMES[1]),
        ("extra_config", r".*layers\.0\.mlp\.down_proj.*"),
    ],
)
def test_settings_of_single_modules_are_read(key: str, pattern: str, tmp_path: Path) -> None:
    """GPTQModel 7.7 (`dynamic`) and auto-round 0.16 (`extra_config`, `auto_round:auto_gptq`)."""
    settings = dict(CASES["gptq4-64"].settings) | {key: {pattern: {"bits": 8, "group_size": -1}}}
    if key == "extra_config":
        settings |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    cases = {NAMES[0]: CASES["gptq4-64"], NAMES[1]: CASES["gptq8--1"]}
    assert not layers_of(settings, cases, tmp_path / "sound").findings
    [finding] = layers_of(settings, cases, tmp_path / "wrong", times(1.1, 3)).findings
    assert (finding.weight, where(finding.place)) == (FAULTY, (3, 0))


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("compressed-pack4-group", {"ignore": ["lm_head", NAMES[1]]}, "ignore names"),
        ("compressed-int8-group", {"ignore": ["re:.*down_proj"]}, "ignore names"),
        ("gptq4-64", {"dynamic": {r"-:.*down_proj": {}}}, "dynamic excludes"),
        (
            "awq",
            {"modules_to_not_convert": ["lm_head", "down_proj"]},
            "modules_to_not_convert names",
        ),
        ("bitsandbytes-int8", {"llm_int8_skip_modules": [NAMES[1]]}, "llm_int8_skip_modules names"),
    ],
)
def test_a_packed_weight_that_the_settings_exclude_is_not_compared(
    name: str, settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    case = CASES[name]
    found = layers_of(dict(case.settings) | settings, dict.fromkeys(NAMES, case), tmp_path)
    assert found.not_compared == (f"{FAULTY} (quantized, though quantization_config.{key} it)",)
    assert (len(found.results), found.findings) == (2, ())
