"""Each format: what its files hold stands for the values that its writer worked out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from assay.errors import UsageError
from assay.models.quantization.judging import WeightComparison
from assay.models.quantization.stored_weights import (
    Format,
    WeightStore,
    open_folder,
    packed_width,
    unpack_bits,
)
from assay.models.quantization.weight_formats import list_weights
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Fault,
    Tensors,
    no_fault,
    pack_words,
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stored_numbers_give_the_values_of_the_writer(case: Case, tmp_path: Path) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    tensors, values = case.write(weight, no_fault)
    shard = {f"model.layers.0.mlp.up_proj.{name}": one for name, one in tensors.items()}
    folder = write_folder(tmp_path / "model", [shard], case.settings)
    stored = open_folder(folder)
    [(name, form)] = list_weights(stored).items()
    assert name == "model.layers.0.mlp.up_proj.weight"
    assert form is not None
    read = form.read(stored, "model.layers.0.mlp.up_proj")
    torch.testing.assert_close(read.dequantize(), values, rtol=1e-6, atol=1e-9)


MODULE = "model.layers.0.mlp.up_proj"
SAMPLES = Path(__file__).parent / "library_samples.safetensors"

with safe_open(SAMPLES, "pt") as samples:
    SETTINGS: dict[str, dict[str, Any]] = {
        name: json.loads(text) for name, text in samples.metadata().items() if name != "versions"
    }


def read(name: str) -> tuple[Tensors, Tensor, Tensor]:
    """What is stored, its values, and the original weight."""
    prefix = f"{name}/stored/"
    with safe_open(SAMPLES, "pt") as file:
        stored = {
            key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)  # noqa: SIM118 - it is no mapping
        }  # fmt: skip
        return stored, file.get_tensor(f"{name}/values"), file.get_tensor("original/values").float()


def write(folder: Path, name: str, stored: Tensors) -> Path:
    settings = dict(SETTINGS[name])
    facts = settings.pop("metadata", None)  # torchao's, of the weight
    metadata = None if facts is None else {f"{MODULE}.weight": facts}
    shard = {f"{MODULE}.{k}": v for k, v in stored.items()}
    return write_folder(folder, [shard], settings, metadata)


def form_of(stored: WeightStore) -> Format:
    [form] = [one for one in list_weights(stored).values() if one is not None]
    return form


every_sample = pytest.mark.parametrize("name", sorted(SETTINGS))


@every_sample
def test_values_are_those_that_the_library_reads(name: str, tmp_path: Path) -> None:
    stored, values, _ = read(name)
    opened = open_folder(write(tmp_path / "model", name, stored))
    read_back = form_of(opened).read(opened, MODULE).dequantize()
    torch.testing.assert_close(read_back, values.float(), rtol=1e-3, atol=1e-7)


@every_sample
def test_what_a_library_wrote_is_no_finding(name: str, tmp_path: Path) -> None:
    stored, _, original = read(name)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": original}])
    found = compare_folders(expected, write(tmp_path / "actual", name, stored))
    assert not found.findings
    assert [one.name for one in found.results] == [f"{MODULE}.weight"]
    assert found.results[0].error < (2.6 if "gptq" in name else 1.4) * found.results[0].best


@pytest.mark.parametrize(
    "name", sorted({*SETTINGS} - {"bitsandbytes-nf4-nested", "transformers-fp8-ue8m0"})
)
def test_scale_that_is_wrong_by_twice_the_resolution_is_named(name: str, tmp_path: Path) -> None:
    """A tenth is seen in all but GPTQ's groups of 64, and 3 bits."""
    stored, _, original = read(name)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": original}])
    sound = write(tmp_path / "sound", name, stored)
    resolution = compare_folders(expected, sound).results[0].resolution
    factor = max(1.1, 1 + 2 * resolution)
    scales = stored[form_of(open_folder(sound)).scales].clone()
    scales.view(-1)[scales.numel() // 2] *= factor
    stored[form_of(open_folder(sound)).scales] = scales
    [finding] = compare_folders(expected, write(tmp_path / "actual", name, stored)).findings
    assert finding.cause == "scale"
    assert finding.amount == pytest.approx(factor, rel=0.15)


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


def test_nibbles_of_one_word() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_bits(word, 4, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_negative_word_has_its_highest_bit_set() -> None:
    assert unpack_bits(torch.tensor([[-1]], dtype=torch.int32), 8, 4).tolist() == [[255] * 4]


def test_three_bits_cross_words() -> None:
    # 10 values fill 30 bits; the 11th, 5 = 0b101, has two bits in the first word and one in the second.
    words = torch.tensor([[0x40000000, 0x00000001, 0]], dtype=torch.int32)
    assert unpack_bits(words, 3, 12).tolist() == [[0] * 10 + [5, 0]]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_width(bits: int) -> None:
    numbers = torch.arange(70).reshape(2, 35) * 13 % (1 << bits)
    packed = pack_words(numbers, bits)
    assert packed.shape[1] == packed_width(bits, 35)
    assert unpack_bits(packed, bits, 35).tolist() == numbers.tolist()


def refusal(
    tmp_path: Path,
    case: Case,
    changes: dict[str, Tensor | None],
    settings: dict[str, Any] | None = None,
) -> str:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    stored: Tensors = {
        f"{MODULE}.{key}": one for key, one in case.write(weight, no_fault)[0].items()
    }
    for key, value in changes.items():
        if value is None:
            del stored[f"{MODULE}.{key}"]
        else:
            stored[f"{MODULE}.{key}"] = value
    actual = write_folder(tmp_path / "actual", [stored], dict(case.settings) | (settings or {}))
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": weight}])
    with pytest.raises(UsageError) as caught:
        compare_folders(expected, actual)
    return str(caught.value).replace(f"{tmp_path}/actual/", "").replace(f"{MODULE}.", "")


FILE = "model-00001-of-00001.safetensors"
INTS = torch.zeros(31, 32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq4-64", {"scales": None}, "qweight is quantized, but scales is missing"),
        ("gptq4-64", {"qzeros": None}, "qweight is quantized, but qzeros is missing"),
        ("gptq4-64", {"qweight": INTS}, "qweight has 31 words a column for 256 inputs of 4 bits"),
        ("gptq4-64", {"qzeros": INTS}, "qzeros has the shape [31, 32], expected [4, 4]"),
        ("gptq4-64", {"g_idx": torch.full((256,), 9)}, "g_idx does not divide 256 columns into groups of 64"),
        ("gptq4-64", {"g_idx": -torch.ones(256, dtype=torch.int64)}, "g_idx does not divide 256 columns into groups of 64"),
        ("awq", {"scales": torch.ones(4, 31)}, "scales has the shape [4, 31], expected [4, 32]"),
        ("awq", {"qzeros": None}, "qweight is quantized, but qzeros is missing"),
        ("compressed-pack4-group", {"weight_packed": INTS}, "weight_packed has the shape [31, 32] for [32, 256] values of 4 bits"),
        ("compressed-pack4-group", {"weight_shape": None}, "weight_packed is quantized, but weight_shape is missing"),
        ("compressed-pack4-group", {"weight_scale": torch.ones(32, 3)}, "weight_scale has 96 values for 32 x 4 groups"),
        ("compressed-pack4-group-zeros", {"weight_zero_point": None}, "weight_packed is quantized, but weight_zero_point is missing"),
        ("compressed-float8-block", {"weight": torch.zeros(32, 256)}, "weight of dtype torch.float32 does not hold float8"),
        ("compressed-int8-group", {"weight_shape": torch.tensor([1, 1]), "weight": torch.zeros(3, 3, 3)}, "weight has the shape [3, 3, 3], expected [any, any]"),
        ("bitsandbytes-nf4", {"weight": torch.zeros(7, 1, dtype=torch.uint8)}, "weight has 7 bytes for 32 x 256 values of 4 bits"),
        ("bitsandbytes-nf4", {"weight.quant_map": None}, "weight is quantized, but weight.quant_map is missing"),
        ("bitsandbytes-nf4", {"weight.absmax": torch.ones(5)}, "weight.absmax has 5 values for 128 x 1 groups"),
        ("bitsandbytes-nf4-nested", {"weight.nested_absmax": torch.ones(9)}, "weight.nested_absmax has the shape [9], expected [1]"),
        ("bitsandbytes-int8", {"SCB": torch.ones(31)}, "SCB has the shape [31], expected [32]"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(3, 3)}, "weight_scale_inv has 9 values for 2 x 4 groups"),
        ("fp8-blocks", {"weight": torch.zeros(32, 256)}, "weight of dtype torch.float32 is not fp8"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    name: str, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, CASES[name], changes) == f"{FILE}: {message}"


@pytest.mark.parametrize(
    ("name", "settings", "shown"),
    [
        ("gptq4-64", {"group_size": 0}, "group_size = 0"),
        ("gptq4-64", {"group_size": -5}, "group_size = -5"),
        ("gptq4-64", {"group_size": "64"}, "group_size = 64"),
        ("gptq4-64", {"bits": 16}, "bits = 16"),
        ("gptq4-64", {"bits": None}, "bits = None"),
        ("awq", {"version": "gemv"}, "version = gemv"),
        ("awq", {"group_size": 0}, "group_size = 0"),
        ("compressed-int8-group", {"config_groups": None}, "config_groups = None"),
        ("fp8-blocks", {"weight_block_size": [0, 64]}, "weight_block_size = [0, 64]"),
        (
            "compressed-int8-group",
            {"config_groups": {"group_0": 3}},
            "config_groups = {'group_0': 3}",
        ),
        ("fp8-blocks", {"weight_block_size": 128}, "weight_block_size = 128"),
    ],
)
def test_settings_that_cannot_be_read(
    name: str, settings: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    message = f"config.json: quantization_config.{shown} cannot be read"
    assert refusal(tmp_path, CASES[name], {}, settings) == message


def test_group_size_zero_of_compressed_tensors(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 0}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    text = refusal(tmp_path, CASES["compressed-int8-group"], {}, {"config_groups": groups})
    assert text.startswith("config.json: quantization_config.config_groups = ")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"shape": [32, 256], "blocksize": 0}, "has shape [32, 256] and blocksize 0"),
        ({"shape": [32, -256], "blocksize": 64}, "has shape [32, -256] and blocksize 64"),
        (
            {"shape": [32, 256], "blocksize": 1 << 40},
            "has shape [32, 256] and blocksize 1099511627776",
        ),
        ({"shape": None, "blocksize": 64}, "has shape None and blocksize 64"),
        ({"shape": "3" * 5, "blocksize": 64}, "has shape 33333 and blocksize 64"),
    ],
)
def test_states_of_bitsandbytes_that_cannot_be(
    state: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    name = "weight.quant_state.bitsandbytes__nf4"
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    assert refusal(tmp_path, CASES["bitsandbytes-nf4"], {name: text}) == f"{FILE}: {name} {problem}"


def test_state_of_bitsandbytes_that_is_no_json(tmp_path: Path) -> None:
    name = "weight.quant_state.bitsandbytes__nf4"
    text = torch.tensor([123, 255, 0], dtype=torch.uint8)
    assert FILE in refusal(tmp_path, CASES["bitsandbytes-nf4"], {name: text})


def test_unknown_method_lists_the_known_ones(tmp_path: Path) -> None:
    text = refusal(tmp_path, CASES["awq"], {}, {"quant_method": "aqlm"})
    assert text == (
        f"{tmp_path}/actual: the quantization method aqlm cannot be read; known methods:"
        " awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gguf, gptq, mxfp4, torchao,"
        " auto_round:auto_gptq, auto_round:auto_awq, auto_round:fp8, auto_round:llm_compressor"
    )


def test_groups_larger_than_the_weight_take_no_memory(tmp_path: Path) -> None:
    case = CASES["gptq8--1"]
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    stored = {f"{MODULE}.{key}": one for key, one in case.write(weight, no_fault)[0].items()}
    settings = dict(case.settings) | {"group_size": (1 << 30) - 1}
    actual = write_folder(tmp_path / "actual", [stored], settings)
    expected = write_folder(tmp_path / "expected", [{f"{MODULE}.weight": weight}])
    assert not compare_folders(expected, actual).findings


SECOND = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("compressed-pack4-group", {"ignore": [SECOND]}),
        ("gptq4-64", {"dynamic": {r"-:.*\.1\.mlp": {}}}),
        ("awq", {"modules_to_not_convert": ["1.mlp.down_proj"]}),
        ("torchao-int8-256", {"quant_type": {"default": {}, SECOND: None}}),
    ],
)
def test_a_float_weight_among_quantized_layers_is_named_unless_it_is_excluded(
    name: str, excluded: dict[str, Any], tmp_path: Path
) -> None:
    case, first = CASES[name], SECOND.replace("1", "0")
    weight = make_weights(0)[NAMES[0]]
    stored, _ = case.write(weight, no_fault)
    shard = {f"{first}.{part}": one for part, one in stored.items()} | {f"{SECOND}.weight": weight}
    both = {f"{first}.weight": weight, f"{SECOND}.weight": weight}
    expected = write_folder(tmp_path / "expected", [both])
    text = f"{SECOND}.weight (float, though it is quantized in other layers)"
    for folder, settings, missing in (("left-out", {}, (text,)), ("excluded", excluded, ())):
        actual = write_folder(tmp_path / folder, [shard], dict(case.settings) | settings)
        assert compare_folders(expected, actual).not_compared == missing
