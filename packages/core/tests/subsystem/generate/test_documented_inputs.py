"""Models that need more than a text or an image get the tensors that their forward call documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.generate.generation_loop import limits_of_generation
from assay.models import load_model
from packages.core.tests.subsystem.commands import Finished
from packages.core.tests.zoo.architectures import Architecture, build_tiny

RunAssay = Callable[..., Finished]

RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")
SHORT = ("--prompt-length", "8:24", "--max-new-tokens", "4")
INSTRUCT_BLIP = Architecture("instructblip", "InstructBlipForConditionalGeneration")
PARAKEET = Architecture("parakeet_rnnt", "ParakeetForRNNT")
SPEECH_T5 = Architecture("speecht5", "SpeechT5ForTextToSpeech")


def save(folder: Path, architecture: Architecture, module: str = "") -> Path:
    torch.manual_seed(0)
    model: Any = build_tiny(architecture)
    model.save_pretrained(folder)
    (folder / "plants.py").write_text(
        f"def plant(model):\n    model.get_submodule({module!r}).register_forward_hook("
        "lambda module, args, output: 1.05 * output)\n"
    )
    return folder


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (INSTRUCT_BLIP, ["qformer_input_ids"]),
        (SPEECH_T5, ["decoder_input_values", "speaker_embeddings"]),
    ],
)
def test_model_gets_the_tensors_that_it_names(
    architecture: Architecture, names: list[str], tmp_path: Path
) -> None:
    loaded = load_model(str(save(tmp_path / "model", architecture)), dtype="float32")

    limits = limits_of_generation(loaded)

    assert [one.name for one in limits.optional or limits.media] == names
    assert not limits.no_media


def test_model_whose_generation_returns_no_logits_is_called_once(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path / "model", PARAKEET)), dtype="float32")

    limits = limits_of_generation(loaded)

    assert not limits.can_generate
    assert limits.only_forward == (
        "generate returned ParakeetRNNTGenerateOutput without sequences and logits"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        (INSTRUCT_BLIP, "qformer.encoder.layer.0.attention.attention.value"),
        (PARAKEET, "joint.head"),
        (SPEECH_T5, "speecht5.decoder.prenet.layers.0"),
    ],
)
def test_fault_in_a_part_that_reads_documented_tensors_is_found(
    architecture: Architecture, module: str, assay: RunAssay, tmp_path: Path
) -> None:
    model = save(tmp_path / "model", architecture, module)
    setup = ("--candidate-setup", f"{model / 'plants.py'}:plant")

    clean = assay("check", "generate", model, *RUNS, *SHORT)
    wrong = assay("check", "generate", model, *RUNS, *SHORT, *setup)

    assert clean.code == 0, clean.stdout
    assert clean.verdict["coverage"]["not_run_parts"] == {}
    assert wrong.code == 1, wrong.stdout
    assert wrong.verdict["location"]["module"] == module
