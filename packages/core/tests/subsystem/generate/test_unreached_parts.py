"""A part that text does not reach: NOT_COMPARED with its name, whatever its code does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.core.tests.subsystem.commands import Finished
from packages.core.tests.subsystem.generate.unreached_models import (
    UNREACHED,
    UnreachedModel,
    save_llama,
    save_model_with_heads,
)

RunAssay = Callable[..., Finished]

SHORT = ("--max-new-tokens", "2", "--prompt-length", "8:24")
RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")

# What every module of a part returns is five times too large.
PLANT = """
import torch


def wrong(parts):
    def plant(model):
        for part in parts:
            for module in model.get_submodule(part).modules():
                module.register_forward_hook(
                    lambda module, args, output: 5 * output if torch.is_tensor(output) else output
                )
    return plant


{name} = wrong({parts!r})
"""
# The fused product leaves out the second expert; rows of position ids trade places in the rotary
# embedding; an adapter is added and switched off.
EXPERT_PLANT = """
def zeroed(model):
    for layer in model.model.layers[1:]:
        experts = layer.mlp.experts
        original = experts.forward

        def forward(tokens, indices, weights, original=original):
            return original(tokens, indices, weights.masked_fill(indices == 2, 0))

        experts.forward = forward
"""
SECTIONS_PLANT = """
def swapped(model):
    model.model.language_model.rotary_emb.mrope_section = [3, 2, 3]
    for layer in model.model.language_model.layers:
        layer.self_attn.config.rope_parameters["mrope_section"] = [3, 2, 3]
"""
ADAPTER_PLANT = """
from peft import LoraConfig, get_peft_model


def switched_off(model):
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, config).base_model.disable_adapter_layers()
"""


@pytest.fixture(params=UNREACHED)
def unreached(request: pytest.FixtureRequest) -> UnreachedModel:
    return UNREACHED[request.param]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts without the images that built-in ones hold."""
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": one * 4}) for one in ("To be. ", "Or not to be. ", "A question. ")]
    path.write_text("\n".join(lines))
    return path


def plant(folder: Path, text: str, name: str) -> str:
    path = folder / "plant.py"
    path.write_text(text)
    return f"{path}:{name}"


@pytest.mark.long
def test_a_fault_in_an_unreached_part_is_no_pass(
    unreached: UnreachedModel, texts: Path, assay: RunAssay, tmp_path: Path
) -> None:
    model = unreached.save(tmp_path / "model")
    setup = plant(tmp_path, EXPERT_PLANT, "zeroed")
    if unreached.change is None:
        setup = plant(
            tmp_path, PLANT.format(name="wrong_part", parts=unreached.parts), "wrong_part"
        )
    options = ("--candidate-setup", setup, "--prompts", texts, *SHORT)

    unsure = assay("check", "generate", model, *RUNS, *options)
    allowed = [word for glob in unreached.globs for word in ("--allow-unused", glob)]
    golden = ("--golden", unsure.folder / "golden", "--candidate", RUNS[-1])
    passed = assay("check", "generate", model, *golden, "--candidate-setup", setup, *allowed)

    assert unsure.code == 3, unsure.stderr
    coverage = unsure.verdict["coverage"]
    named = (*coverage["not_run_parts"], *coverage["unrouted_experts"])
    assert named == unreached.parts
    assert all(part in unsure.stdout for part in unreached.parts[:2])
    assert passed.code == 0, passed.stdout
    assert passed.stdout.splitlines()[1].startswith("What ran of the model agrees")
    assert any("as --allow-unused allows" in note for note in passed.verdict["notes"])


@pytest.mark.long
def test_swapped_position_sections_are_told_where_all_rows_are_equal(
    texts: Path, assay: RunAssay, tmp_path: Path
) -> None:
    model = UNREACHED["qwen2_vl"].save(tmp_path / "model")
    setup = plant(tmp_path, SECTIONS_PLANT, "swapped")
    options = ("--candidate-setup", setup, "--prompts", texts, *SHORT)

    run = assay("check", "generate", model, *RUNS, *options)

    assert run.code == 3
    assert "the rows of position_ids never differed" in run.stdout


def test_heads_and_parameters_that_nothing_uses_are_named(assay: RunAssay, tmp_path: Path) -> None:
    model = save_model_with_heads(tmp_path / "model")

    run = assay("check", "generate", model, *RUNS, *SHORT, "--trust-remote-code")

    assert run.code == 3
    assert run.verdict["coverage"]["not_run_parts"] == {"mtp": 9, "value_head": 1}
    assert run.verdict["coverage"]["unused_parameters"] == ["logit_scale"]


@pytest.mark.long
@pytest.mark.parametrize("level", ["auto", "logits", "tokens"])
def test_an_adapter_that_is_switched_off_is_named(
    level: str, assay: RunAssay, tmp_path: Path
) -> None:
    model = save_llama(tmp_path / "model")
    setup = plant(tmp_path, ADAPTER_PLANT, "switched_off")

    run = assay(
        "check", "generate", model, *RUNS, *SHORT, "--candidate-setup", setup, "--level", level
    )

    assert run.code == 3, run.stderr
    coverage = run.verdict["coverage"]
    assert list(coverage["not_run_parts"]) == [
        f"model.layers.{layer}.self_attn.q_proj.lora_{part}" for layer in (0, 1) for part in "AB"
    ]
    assert (coverage["modules_run"], coverage["modules"]) == (21, 21)


@pytest.mark.long
@pytest.mark.parametrize("level", ["auto", "logits"])
def test_a_plain_model_is_covered_whole(level: str, assay: RunAssay, tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model")

    run = assay("check", "generate", model, *RUNS, *SHORT, "--level", level)

    assert run.code == 0
    assert "coverage: all 21 modules with parameters ran" in run.stdout
    assert run.stdout.splitlines()[1] == "The candidate agrees with the reference."
