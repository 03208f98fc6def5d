"""Models that read images or sounds inside texts: these are made from the seed, and faults are located."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from packages.core.tests.subsystem.commands import Finished, run_in_process
from packages.core.tests.subsystem.generate.image_models import MODELS, save_model, save_processor

RunAssay = Callable[..., Finished]
Capture = Callable[[str], tuple[Path, Path]]

PLANTS = Path(__file__).with_name("image_plants.py")
INPUTS = ("--prompt-length", "8:24", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Return a model's folder and its golden for candidates in float32 and bfloat16."""

    @cache
    def of_model(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("models")
        model = save_model(folder / name, name)
        captured = run_in_process(
            folder / "golden", "capture", model, "--run", "cpu/float32",
            "--noise-for", "float32,bfloat16", *INPUTS,
        )  # fmt: skip
        assert captured.code == 0, captured.stderr
        return model, folder / "golden"

    return of_model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("llava", "bfloat16") else pytest.mark.long)
        for name in MODELS
        for dtype in ("float32", "bfloat16")
    ],
)  # fmt: skip
def test_clean_model_passes_with_its_tower(
    name: str, dtype: str, capture: Capture, assay: RunAssay
) -> None:
    model, golden = capture(name)

    run = assay("check", "generate", model, "--golden", golden, "--candidate", f"cpu/{dtype}")

    assert run.code == 0, run.stdout
    assert run.verdict["coverage"]["not_run_parts"] == {}
    assert not [note for note in run.verdict["notes"] if "no text holds" in note]


FAULTS = [
    ("llava", "embeddings_one_token_late", "forward", "model"),
    ("llava", "image_of_another_row", "inputs", ""),
    ("llava", "other_normalization", "inputs", "model.vision_tower"),
    ("llava", "projector_without_bias", "forward", "model.multi_modal_projector.linear_1"),
    ("llava", "tower_in_bfloat16", "forward", "model.vision_tower.embeddings.patch_embedding"),
    ("qwen2_vl", "axes_swapped", "forward", "model.language_model.rotary_emb"),
    ("qwen2_vl", "patches_by_column", "forward", "model.visual.patch_embed"),
    ("qwen2_vl", "images_attend_to_each_other", "forward", "model.visual.blocks.0.attn"),
    ("qwen2_vl", "decode_without_offset", "forward", "model"),
    ("qwen3_vl", "positions_resized_by_cubic", "forward", "model.visual"),
    ("gemma3", "image_read_causally", "forward", "model"),
    ("idefics3", "padding_patches_read", "forward", "model.vision_model"),
    ("qwen2_audio", "padding_of_sounds_read", "forward", "model.audio_tower"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "plant", "phase", "module"), FAULTS)
def test_fault_of_an_image_is_located(
    name: str, plant: str, phase: str, module: str, capture: Capture, assay: RunAssay
) -> None:
    model, golden = capture(name)
    run = assay(
        "check", "generate", model, "--golden", golden, "--candidate", "cpu/float32",
        "--candidate-setup", f"{PLANTS}:{plant}",
    )  # fmt: skip

    assert run.code == 1, run.stdout
    place = run.verdict["location"]
    assert (place["phase"], place["module"]) == (phase, module)


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with its processor, and of two images."""
    model = save_model(tmp_path_factory.mktemp("models") / "llava", "llava")
    save_processor(model)
    for number, size in enumerate([(60, 40), (50, 90)]):
        colors = bytes((7 * one + 13 * (one // 50)) % 256 for one in range(3 * size[0] * size[1]))
        Image.frombytes("RGB", size, colors).save(model / f"{number}.png")
    lines = [
        {"text": "Compare <image> with <image>.", "images": ["0.png", "1.png"]},
        {"prompt": "Without an image."},
        {"prompt": "Describe it.", "images": ["1.png"]},
    ]
    (model / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return model


RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16", "--max-new-tokens", "4")


@pytest.mark.long
def test_processor_of_the_model_makes_its_images(processed: Path, assay: RunAssay) -> None:
    run = assay("check", "generate", processed, *RUNS, "--prompt-length", "8:24")

    assert run.code == 0, run.stdout
    assert run.verdict["coverage"]["not_run_parts"] == {}
    assert [*run.folder.glob("golden/*/attachments/media.safetensors")]


@pytest.mark.long
@pytest.mark.parametrize("plant", [None, "image_of_another_row"])
def test_prompts_of_a_file_hold_their_own_images(
    plant: str | None, processed: Path, assay: RunAssay
) -> None:
    setup = () if plant is None else ("--candidate-setup", f"{PLANTS}:{plant}")
    run = assay(
        "check", "generate", processed, *RUNS, "--prompts", processed / "prompts.jsonl", *setup
    )  # fmt: skip

    if plant is None:
        assert run.code == 0, run.stdout
        assert run.verdict["coverage"]["not_run_parts"] == {}
    else:
        assert run.verdict["diagnosis"] == "inputs-differ"


def test_images_without_a_processor_are_refused(
    assay: RunAssay, prompt_file: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    prompts = prompt_file('{"prompt": "a", "images": ["a.png"]}')

    run = assay("check", "generate", "micro:llama", *RUNS, "--prompts", prompts)

    assert run.code == 2
    assert "p.jsonl, line 1: images cannot be read: LlamaForCausalLM reads no images" in run.stderr
