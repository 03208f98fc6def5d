"""python -m packages.core.tests.foreign.making.quantize_autoround FOLDERS, with auto-round 0.16.1."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDERS = Path(sys.argv[1])
ORIGINAL = FOLDERS / "original-bfloat16"
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(3, 250, (1, 64), generator=GENERATOR) for _ in range(16)]
FOUR_BITS: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": True, "iters": 8}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "round": ("auto_round", FOUR_BITS),
    "gptq": ("auto_gptq", FOUR_BITS),
    "awq-asym": ("auto_awq", FOUR_BITS | {"sym": False}),
    "nvfp4": ("auto_round", {"scheme": "NVFP4", "iters": 0}),
}
for name, (layout, settings) in SETTINGS.items():
    model = AutoModelForCausalLM.from_pretrained(ORIGINAL, dtype="auto")
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(ORIGINAL), dataset=TEXTS, nsamples=16, seqlen=64,
        batch_size=4, device_map="cpu", **settings,
    )  # fmt: skip
    with TemporaryDirectory() as saved:
        rounding.quantize_and_save(saved, format=layout)
        [folder] = Path(saved).iterdir()
        shutil.move(folder, FOLDERS / f"autoround-{name}")
