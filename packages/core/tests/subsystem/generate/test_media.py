"""Models of images or sounds: their inputs are made from seeds, in a shape that the model takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    LightGlueConfig,
    LightGlueForKeypointMatching,
    PreTrainedModel,
    RTDetrConfig,
    RTDetrForObjectDetection,
    SiglipVisionConfig,
    SiglipVisionModel,
    TimeSeriesTransformerConfig,
    TimeSeriesTransformerModel,
    TrOCRConfig,
    VideoMAEConfig,
    VideoMAEForPreTraining,
    VideoMAEForVideoClassification,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    VitPoseBackboneConfig,
    VitPoseConfig,
    VitPoseForPoseEstimation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from assay.media import find_input_limits
from assay.models import load_model
from assay.models.transformers_calls import quiet_transformers
from packages.core.tests.subsystem.commands import Finished

RunAssay = Callable[..., Finished]

RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")
LAYERS: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
IMAGES: dict[str, Any] = {"image_size": 32, "patch_size": 8}
SOUNDS: dict[str, Any] = {
    "conv_dim": [32, 32, 32],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "vocab_size": 40,
}
WHISPER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 300,
    "num_mel_bins": 16,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}

PLANTS = """
import torch


def transposed_patches(model):
    projection = next(m for m in model.modules() if isinstance(m, torch.nn.Conv2d))
    projection.weight.data = projection.weight.data.transpose(-1, -2).contiguous()


def other_normalization(model):
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "pixel_values": kwargs["pixel_values"] * 0.9}),
        with_kwargs=True,
    )


def transposed_convolution(model):
    weight = model.model.encoder.conv2.weight
    weight.data = weight.data.flip(-1)


def other_mask(model):
    with torch.no_grad():
        model.embeddings.mask_token[..., 0] += 1


def rolled_cross_cache(model):
    decoder = model.get_decoder()
    forward = decoder.forward

    def changed(*args, **kwargs):
        cache = kwargs["past_key_values"]
        if cache.get_seq_length() == 2:
            for layer in cache.cross_attention_cache.layers:
                layer.keys = layer.keys.roll(1, 0)
        return forward(*args, **kwargs)

    decoder.forward = changed


def scaled_layer(model):
    model.decoder.layers[1].fc2.register_forward_hook(lambda module, args, output: 1.05 * output)


def scaled_convolution(model):
    layer = model.wav2vec2.feature_extractor.conv_layers[1].conv
    layer.register_forward_hook(lambda module, args, output: 1.03 * output)
"""


def save(folder: Path, kind: type[PreTrainedModel], config: Any) -> Path:
    torch.manual_seed(0)
    with quiet_transformers():
        kind(config).save_pretrained(folder)
    (folder / "plants.py").write_text(PLANTS)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = ViTConfig(initializer_range=0.1, **LAYERS, **IMAGES)
    return save(tmp_path_factory.mktemp("models") / "vit", ViTForImageClassification, config)


def test_image_classifier_passes(classifier: Path, assay: RunAssay) -> None:
    run = assay("check", "generate", classifier, *RUNS)

    assert run.code == 0, run.stdout
    assert {*run.verdict["levels"]["outputs"]["outputs"]} == {"logits"}
    assert run.verdict["coverage"]["not_run_parts"] == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "module"),
    [
        ("transposed_patches", "vit.embeddings.patch_embeddings.projection"),
        ("other_normalization", None),
    ],
)
def test_fault_in_the_images_is_found(
    plant: str, module: str | None, classifier: Path, assay: RunAssay
) -> None:
    setup = f"{classifier / 'plants.py'}:{plant}"

    run = assay("check", "generate", classifier, *RUNS, "--candidate-setup", setup)

    assert run.code == 1, run.stdout
    if module is None:
        assert run.verdict["diagnosis"] == "inputs-differ"
    else:
        assert run.verdict["location"]["module"] == module


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "config", "other_uses"),
    [
        (SiglipVisionModel, SiglipVisionConfig(**LAYERS, **IMAGES), {}),
        (VideoMAEForVideoClassification, VideoMAEConfig(num_frames=4, **LAYERS, **IMAGES), {}),
        (VideoMAEForPreTraining, VideoMAEConfig(num_frames=4, **LAYERS, **IMAGES), {}),
        (ASTForAudioClassification, ASTConfig(max_length=64, num_mel_bins=32, **LAYERS), {}),
        (
            Wav2Vec2ForCTC,
            Wav2Vec2Config(**LAYERS, **SOUNDS),
            {"wav2vec2.masked_spec_embed": "in training"},
        ),
        (Dinov2Model, Dinov2Config(**LAYERS, **IMAGES), {}),
        (
            Dinov2ForImageClassification,
            Dinov2Config(**LAYERS, **IMAGES),
            {"dinov2.embeddings.mask_token": "with bool_masked_pos"},
        ),
    ],
)
def test_models_of_images_videos_and_sounds_pass(
    kind: type[PreTrainedModel],
    config: Any,
    other_uses: dict[str, str],
    assay: RunAssay,
    tmp_path: Path,
) -> None:
    model = save(tmp_path / "model", kind, config)

    run = assay("check", "generate", model, *RUNS)

    assert run.code == 0, run.stdout
    assert run.verdict["levels"]["outputs"]["verdict"] == "PASS"
    coverage = run.verdict["coverage"]
    assert (coverage["unused_parameters"], coverage["other_uses"]) == ([], other_uses)


@pytest.mark.parametrize(
    ("kind", "config", "shape"),
    [
        (
            VitPoseForPoseEstimation,
            VitPoseConfig(backbone_config=VitPoseBackboneConfig(image_size=[64, 48], **LAYERS)),
            (1, 3, 64, 48),
        ),
        # Chooses 300 of the places in three feature maps, which a small image does not have.
        (RTDetrForObjectDetection, RTDetrConfig(decoder_layers=1), (1, 3, 224, 224)),
        (LightGlueForKeypointMatching, LightGlueConfig(), (1, 2, 3, 64, 64)),
    ],
)
def test_size_and_number_of_images_are_those_that_the_model_takes(
    kind: type[PreTrainedModel], config: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = save(tmp_path / "model", kind, config)
    (media,) = find_input_limits(load_model(str(model), dtype="float32")).media
    assert (media.name, media.shape) == ("pixel_values", shape)


QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 8,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}
INKLING: dict[str, Any] = {
    **LAYERS,
    "patch_size": 8,
    "projection_hidden_dim": 64,
    "text_hidden_size": 64,
}


def save_tower(
    folder: Path, package: str, kind: str, config: str, settings: dict[str, Any]
) -> Path:
    """Save a tower of `package`, which older versions of transformers lack."""
    module = pytest.importorskip(f"transformers.models.{package}")
    return save(folder, getattr(module, kind), getattr(module, config)(**settings))


@pytest.mark.parametrize(
    ("package", "kind", "config", "settings", "expected"),
    [
        # Patches of 3 channels, 2 frames and 8 x 8 pixels: 4 x 6 of them, which are merged 2 x 2.
        (
            "qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            "Qwen2_5_VLVisionConfig",
            QWEN,
            {"hidden_states": (24, 384), "grid_thw": (1, 3)},
        ),
        (
            "siglip2",
            "Siglip2VisionModel",
            "Siglip2VisionConfig",
            {**LAYERS, "patch_size": 8, "num_patches": 16},
            {
                "pixel_values": (1, 24, 192),
                "spatial_shapes": (1, 2),
                "pixel_attention_mask": (1, 24),
            },
        ),
        # Pooled 3 x 3.
        (
            "gemma4",
            "Gemma4VisionModel",
            "Gemma4VisionConfig",
            {**LAYERS, "head_dim": 16, "num_key_value_heads": 4, "patch_size": 8},
            {"pixel_values": (1, 54, 192), "pixel_position_ids": (1, 54, 2)},
        ),
        # 2 x 3 blocks of 2 x 2 patches, with channels last.
        (
            "inkling2",
            "Inkling2VisionModel",
            "Inkling2VisionConfig",
            INKLING,
            {"pixel_values": (6, 16, 16, 3), "image_grid_thw": (1, 3)},
        ),
    ],
)
def test_tower_gets_the_patches_of_an_image(
    package: str,
    kind: str,
    config: str,
    settings: dict[str, Any],
    expected: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    model = save_tower(tmp_path / "model", package, kind, config, settings)

    media = find_input_limits(load_model(str(model), dtype="float32")).media

    assert {one.name: one.shape for one in media} == expected


@pytest.mark.parametrize(
    ("package", "kind", "config", "settings", "module"),
    [
        (
            "qwen2_5_vl",
            "Qwen2_5_VisionTransformerPretrainedModel",
            "Qwen2_5_VLVisionConfig",
            QWEN,
            "blocks.1.attn.proj",
        ),
        (
            "inkling2",
            "Inkling2VisionModel",
            "Inkling2VisionConfig",
            INKLING,
            "layers.1.self_attn.out_proj",
        ),
    ],
)
def test_fault_in_a_tower_is_found(
    package: str,
    kind: str,
    config: str,
    settings: dict[str, Any],
    module: str,
    assay: RunAssay,
    tmp_path: Path,
) -> None:
    model = save_tower(tmp_path / "model", package, kind, config, settings)
    (model / "fault.py").write_text(
        f"def plant(model):\n    model.get_submodule({module!r}).register_forward_hook("
        "lambda module, args, output: 1.05 * output)\n"
    )

    clean = assay("check", "generate", model, *RUNS)
    run = assay(
        "check", "generate", model, *RUNS, "--candidate-setup", f"{model / 'fault.py'}:plant"
    )

    assert clean.code == 0, clean.stdout
    assert clean.verdict["levels"]["outputs"]["verdict"] == "PASS"
    assert run.code == 1, run.stdout
    assert run.verdict["location"]["module"] == module


@pytest.mark.parametrize(
    ("plant", "module"), [(None, None), ("scaled_layer", "decoder.layers.1.fc2")]
)
def test_fault_in_a_model_of_time_series_is_found(
    plant: str | None, module: str | None, assay: RunAssay, tmp_path: Path
) -> None:
    config = TimeSeriesTransformerConfig(
        context_length=12, prediction_length=4, lags_sequence=[1, 2], num_time_features=3
    )
    model = save(tmp_path / "model", TimeSeriesTransformerModel, config)
    loaded = load_model(str(model), dtype="float32")
    setup = () if plant is None else ("--candidate-setup", f"{model / 'plants.py'}:{plant}")

    run = assay("check", "generate", model, *RUNS, *setup)

    # The encoder sees 12 values, each with those of 1 and 2 steps before it.
    assert {media.name: media.shape for media in find_input_limits(loaded).media} == {
        "past_values": (1, 14),
        "past_time_features": (1, 14, 3),
        "past_observed_mask": (1, 14),
    }
    if plant is None:
        assert run.code == 0, run.stdout
        assert run.verdict["coverage"]["not_run_parts"] == {}
    else:
        assert run.code == 1, run.stdout
        assert run.verdict["location"]["module"] == module


def test_wrong_vector_of_masked_patches_is_found(assay: RunAssay, tmp_path: Path) -> None:
    model = save(tmp_path / "model", Dinov2Model, Dinov2Config(**LAYERS, **IMAGES))
    setup = f"{model / 'plants.py'}:other_mask"

    run = assay("check", "generate", model, *RUNS, "--candidate-setup", setup)

    assert run.code == 1, run.stdout
    assert run.verdict["location"]["module"] == "embeddings"


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "module"),
    [(None, None), ("transposed_patches", "vision_model.embeddings.patch_embedding")],
)
def test_contrastive_pair_gets_an_image_next_to_each_text(
    plant: str | None, module: str | None, assay: RunAssay, tmp_path: Path
) -> None:
    tokens = {"vocab_size": 300, "bos_token_id": 298, "eos_token_id": 299, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**LAYERS, **tokens, "max_position_embeddings": 64},
        vision_config={**LAYERS, **IMAGES},
        projection_dim=32,
    )
    model = save(tmp_path / "model", CLIPModel, config)
    setup = () if plant is None else ("--candidate-setup", f"{model / 'plants.py'}:{plant}")

    run = assay("check", "generate", model, *RUNS, *setup)

    if plant is None:
        assert run.code == 0, run.stdout
        assert "logits_per_image" in run.verdict["levels"]["outputs"]["outputs"]
    else:
        assert run.code == 1, run.stdout
        assert run.verdict["location"]["module"] == module


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "module"),
    [
        (None, None),
        ("transposed_convolution", "model.encoder.conv2"),
        ("rolled_cross_cache", "model.decoder"),
    ],
)
def test_speech_is_generated_from_sounds(
    plant: str | None, module: str | None, assay: RunAssay, tmp_path: Path
) -> None:
    config = WhisperConfig(**WHISPER)
    model = save(tmp_path / "model", WhisperForConditionalGeneration, config)
    setup = () if plant is None else ("--candidate-setup", f"{model / 'plants.py'}:{plant}")

    run = assay("check", "generate", model, *RUNS, "--max-new-tokens", "4", *setup)

    if plant is None:
        assert run.code == 0, run.stdout
        assert run.verdict["levels"]["tokens"]["verdict"] == "PASS"
    else:
        assert run.code == 1, run.stdout
        assert run.verdict["location"]["module"] == module


def test_text_is_read_from_an_image(assay: RunAssay, tmp_path: Path) -> None:
    # The encoder's attention is sdpa by default. TrOCR's is eager, and it refuses sdpa.
    decoder: dict[str, Any] = {
        "d_model": 64,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 128,
        "vocab_size": 300,
        "max_position_embeddings": 64,
    }
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**LAYERS, **IMAGES), TrOCRConfig(**decoder)
    )
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = save(tmp_path / "model", VisionEncoderDecoderModel, config)

    run = assay("check", "generate", model, *RUNS, "--max-new-tokens", "4")

    assert run.code == 0, run.stdout
    assert run.verdict["levels"]["load"]["verdict"] == "PASS"


@pytest.mark.long
def test_scaled_convolution_of_a_speech_model_is_found(assay: RunAssay, tmp_path: Path) -> None:
    model = save(tmp_path / "model", Wav2Vec2ForCTC, Wav2Vec2Config(**LAYERS, **SOUNDS))
    setup = f"{model / 'plants.py'}:scaled_convolution"

    run = assay("check", "generate", model, *RUNS, "--candidate-setup", setup)

    assert run.code == 1, run.stdout
    place = run.verdict["location"]["module"]
    assert place == "wav2vec2.feature_extractor.conv_layers.1.conv"
