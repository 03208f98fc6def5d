"""A random tiny model whose router corrects its scores and opens groups of experts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from assay.models.transformers_calls import quiet_transformers
from packages.core.tests.subsystem.commands import run_in_process
from packages.core.tests.subsystem.generate import router_plants
from packages.core.tests.zoo.architectures import Architecture, build_tiny

pytestmark = pytest.mark.long

PLANTS = Path(router_plants.__file__)
SIZES = ("--max-new-tokens", "4", "--prompt-length", "12:24")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model(
        "glm4_moe",
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=32,
        n_routed_experts=router_plants.NUM_EXPERTS,
        num_experts_per_tok=router_plants.CHOSEN,
        n_group=router_plants.NUM_GROUPS,
        topk_group=router_plants.OPEN_GROUPS,
        first_k_dense_replace=1,
        vocab_size=260,
        max_position_embeddings=64,
        pad_token_id=258,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("glm4_moe")
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(config)
        for layer in made.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
        made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("goldens") / "golden"
    done = run_in_process(
        folder, "capture", model, "--run", "cpu/float32", "--noise-for", "bfloat16", *SIZES
    )
    assert done.code == 0, done.stderr
    return folder


ROUTER = "model.layers.1.mlp.gate"


@pytest.mark.parametrize("plant", ["as_it_is", None])
def test_correct_router_passes_whatever_experts_rounding_exchanges(
    model: Path, golden: Path, tmp_path: Path, plant: str | None
) -> None:
    setup = ("--candidate-setup", f"{PLANTS}:{plant}") if plant else ()
    done = run_in_process(
        tmp_path / "run", "check", "generate", model, "--golden", golden,
        "--candidate", "cpu/bfloat16", *setup,
    )  # fmt: skip

    assert done.verdict["verdict"] == "PASS", done.stdout
    assert any("chose other experts" in note for note in done.verdict["notes"])


@pytest.mark.parametrize(
    "plant",
    ["correction_dropped", "groups_ignored", "not_renormalised", "third_best_for_second"],
)
def test_wrong_router_fails_where_it_is(
    model: Path, golden: Path, tmp_path: Path, plant: str
) -> None:
    done = run_in_process(
        tmp_path / "run", "check", "generate", model, "--golden", golden,
        "--candidate", "cpu/bfloat16", "--candidate-setup", f"{PLANTS}:{plant}",
    )  # fmt: skip

    assert done.verdict["verdict"] == "FAIL", done.stdout
    assert done.verdict["location"]["module"] == ROUTER
    assert done.verdict["diagnosis"] == "module-error"


def test_rows_in_the_order_of_experts_pass_beside_padding(tmp_path: Path) -> None:
    # JetMoe passes the rows of all chosen experts to one linear layer. sdpa and eager attend to nothing in another
    # way, so the rows of padding choose other experts and move all others.
    config = AutoConfig.for_model(
        "jetmoe", hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16,
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, vocab_size=260,
        max_position_embeddings=64, pad_token_id=258, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    done = run_in_process(
        tmp_path / "run", "check", "generate", tmp_path / "model", "--reference", "cpu/float32",
        "--candidate", "cpu/float32", *SIZES,
    )  # fmt: skip

    assert done.verdict["verdict"] == "PASS", done.stdout


def test_keys_that_rounding_exchanges_pass_and_a_wrong_indexer_fails(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(1)
        made = build_tiny(Architecture("deepseek_v32", "DeepseekV32ForCausalLM"))
        made.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    check = "check", "generate", tmp_path / "model", "--candidate", "cpu/bfloat16"

    clean = run_in_process(tmp_path / "run", *check, "--reference", "cpu/float32", *SIZES)
    assert clean.verdict["verdict"] == "PASS", clean.stdout
    assert any("chose other experts or keys" in note for note in clean.verdict["notes"])

    golden, plant = tmp_path / "run/golden", f"{PLANTS}:keys_of_another_text"
    wrong = run_in_process(
        tmp_path / "wrong", *check, "--golden", golden, "--candidate-setup", plant
    )
    assert wrong.verdict["location"]["module"] == "model.layers.0.self_attn.indexer"
