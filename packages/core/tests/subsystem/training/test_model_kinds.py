"""Models of every task train: each kind passes, and one planted fault is found at its place."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from assay.models.transformers_calls import quiet_transformers
from assay.runs import SilentProgress
from assay.training.check import check_candidate, record_golden
from assay.training.model_batches import TrainingData
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.subsystem.training.conftest import RunTrain
from packages.core.tests.zoo.architectures import Architecture, build_tiny

pytestmark = pytest.mark.long

PLANTS = Path(__file__).with_name("kind_plants.py")

_SMALL: dict[str, Any] = {"initializer_range": 0.1, "pad_token_id": 0}
SOUND = Wav2Vec2Config(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    vocab_size=32,
    conv_dim=[32] * 3,
    conv_stride=[5, 4, 4],
    conv_kernel=[10, 8, 4],
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    layerdrop=0.0,
    **_SMALL,
)
SPEECH = WhisperConfig(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    vocab_size=384,
    num_mel_bins=16,
    max_source_positions=24,
    decoder_start_token_id=1,
    bos_token_id=1,
    eos_token_id=2,
    init_std=0.1,
    **_SMALL,
)
TOWER = ("model.vision_tower.*",)


@dataclass(frozen=True)
class Kind:
    """A kind of model, and a fault in its training.

    plant: a class or a function of `kind_plants.py`.
    level, phase, module, diagnosis: the place of the fault; all faults are in step 0.
    """

    model: Architecture | tuple[type[nn.Module], Any]
    loss: str
    plant: str
    level: str
    phase: str
    module: str
    diagnosis: str
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def _llava(plant: str, level: str, phase: str, module: str, diagnosis: str) -> Kind:
    model = Architecture("llava", "LlavaForConditionalGeneration")
    place = (level, phase, module, diagnosis)
    return Kind(model, "next-token", plant, *place, TOWER, ("*post_layernorm*",))


def _kind(model_type: str, name: str, *rest: Any) -> Kind:
    return Kind(Architecture(model_type, name), *rest)


KINDS = {
    "sequence classifier": _kind(
        "bert", "BertForSequenceClassification", "class",
        "MeanOfRows", "loss", "forward", "", "loss-scale",
    ),
    "token classifier": _kind(
        "bert", "BertForTokenClassification", "token",
        "ShiftsLabels", "inputs", "inputs", "", "inputs-differ",
    ),
    "masked model": _kind(
        "bert", "BertForMaskedLM", "token",
        "ShiftsLabels", "inputs", "inputs", "", "inputs-differ",
    ),
    "reward": _kind(
        "llama", "LlamaForSequenceClassification", "regression",
        "HalvesSquares", "loss", "forward", "", "loss-scale",
    ),
    "T5": _kind(
        "t5", "T5ForConditionalGeneration", "token",
        "ShowsTargets", "inputs", "inputs", "", "inputs-differ",
    ),
    "BART": _kind(
        "bart", "BartForConditionalGeneration", "token",
        "wrong_cross_attention", "activations", "forward",
        "model.decoder.layers.1.encoder_attn.k_proj", "module-error",
    ),
    "BART: after dropout": _kind(
        "bart", "BartForConditionalGeneration", "token",
        "wrong_input_of_layer", "activations", "forward", "model.decoder", "module-error",
    ),
    "speech to text": Kind(
        (WhisperForConditionalGeneration, SPEECH), "token",
        "TrainsPadding", "inputs", "inputs", "", "inputs-differ",
    ),
    "CTC": Kind(
        (Wav2Vec2ForCTC, SOUND), "ctc",
        "wrong_blank", "loss", "forward", "", "module-error",
    ),
    "image classifier": _kind(
        "vit", "ViTForImageClassification", "class",
        "WeightsClasses", "loss", "forward", "", "loss-scale",
    ),
    "images in texts: labels": _llava("TrainsImageTokens", "inputs", "inputs", "", "inputs-differ"),
    "images in texts: projector": _llava(
        "projector_without_gradient", "gradients", "backward",
        "model.multi_modal_projector", "module-error",
    ),
    "images in texts: tower": _llava("TrainsTower", "updates", "optimizer", "model.vision_tower.embeddings", "optimizer-update"),
    "mixture of experts": _kind(
        "mixtral", "MixtralForCausalLM", "next-token",
        "router_without_gradient", "gradients", "backward", "model.layers.1.mlp.gate", "frozen-parameters",
    ),
    "state-space model": _kind(
        "mamba", "MambaForCausalLM", "next-token",
        "wrong_gradient_of_convolution", "gradients", "backward",
        "backbone.layers.1.mixer.in_proj", "module-error",
    ),
}  # fmt: skip
# The training of their model is another kind's.
ALIKE = {"BART: after dropout", "images in texts: projector", "images in texts: tower"}

Judge = Callable[..., Verdict]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture
def judge(folder: Path, tmp_path: Path) -> Judge:
    """Check the training of a kind of model; models and goldens are made once."""

    def check(kind: Kind, dtype: str, plant: str | None = None, **changes: Any) -> Verdict:
        place = folder / _save(kind, folder)
        options = TrainOptions(
            model=str(place), frozen=kind.frozen, lora=changes.pop("lora", False)
        )
        golden = place / f"golden-{dtype}-{options.lora}-{bool(options.frozen)}"
        code = None if plant is None else f"{PLANTS}:{plant}"
        is_class = plant is not None and plant[0].isupper()
        given = {"trainer" if is_class else "setup": code} | changes
        request = TrainCheck(
            options, "cpu/float32", f"cpu/{dtype}", allow_unused=kind.unused, **given
        )
        if not golden.exists():
            record_golden(request, golden, SilentProgress())
        assert TrainingData.read(golden).loss == kind.loss
        return check_candidate(request, golden, tmp_path, SilentProgress())

    return check


def _save(kind: Kind, folder: Path) -> str:
    """Save the model of a kind, and return the name of its folder."""
    model_of = kind.model
    name = model_of.class_name if isinstance(model_of, Architecture) else model_of[0].__name__
    if not (folder / name).exists():
        torch.manual_seed(0)
        with quiet_transformers():
            if isinstance(model_of, Architecture):
                model: Any = build_tiny(model_of)
            else:
                model = model_of[0](model_of[1])
            if kind.loss == "regression":
                model.config.num_labels = 1
                model = type(model)(model.config)
            model.save_pretrained(folder / name)
    return name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ALIKE])
def test_correct_training_passes(judge: Judge, name: str, dtype: str) -> None:
    verdict = judge(KINDS[name], dtype)

    assert verdict.verdict is Outcome.PASS, verdict


@pytest.mark.parametrize("name", KINDS)
def test_fault_is_found_at_its_place(judge: Judge, name: str) -> None:
    kind = KINDS[name]
    verdict = judge(kind, "float32", kind.plant)

    assert verdict.verdict is Outcome.FAIL
    place = verdict.location
    assert place is not None
    found = (
        verdict.levels[kind.level].verdict,
        place.phase,
        place.step,
        place.module,
        verdict.diagnosis,
    )
    assert found == (Outcome.FAIL, kind.phase, 0, kind.module, kind.diagnosis)


@pytest.mark.parametrize("name", ["sequence classifier", "T5", "CTC", "images in texts: labels"])
@pytest.mark.parametrize(
    "changes", [{"lora": True}, {"trainer": "fsdp", "mesh": {"dp": 2}}], ids=["lora", "fsdp"]
)
def test_adapters_and_shards_pass(judge: Judge, name: str, changes: dict[str, Any]) -> None:
    verdict = judge(KINDS[name], "float32", **changes)

    assert verdict.verdict is Outcome.PASS, verdict


def test_tower_whose_hidden_states_are_captured_trains(judge: Judge) -> None:
    kind = replace(KINDS["images in texts: labels"], frozen=())

    assert judge(kind, "float32").verdict is Outcome.PASS


def test_frozen_parameters_are_not_trained(train: RunTrain) -> None:
    run = train("--candidate", "cpu/float32", "--freeze", "*embed*")

    assert run.code == 0, run.stdout
    updated = {row["module"] for row in run.measurements if row["level"] == "updates"}
    assert "model.norm" in updated
    assert "model.embed_tokens" not in updated
