"""python -m packages.core.tests.foreign.making.quantize_llmcompressor FOLDERS, with llm-compressor 0.14.0.1."""

import sys
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

FOLDERS = Path(sys.argv[1])


def group(targets: str, num_bits: int = 4, *, symmetric: bool = True, **settings: Any) -> Any:
    """Return the scheme of one group of modules; its scales are per group unless `settings` differ."""
    settings = {"strategy": "group", "group_size": 64} | settings
    weights = QuantizationArgs(num_bits=num_bits, symmetric=symmetric, **settings)
    return QuantizationScheme(targets=[targets], weights=weights)


def channels(targets: str, *, symmetric: bool) -> Any:
    """Return the scheme of int8 with a scale for each row."""
    return group(targets, 8, symmetric=symmetric, strategy="channel", group_size=None)


SCHEMES: dict[str, dict[str, Any]] = {
    "w4a16": {"config_groups": {"group_0": group("Linear")}},
    "int8-asym": {"config_groups": {"group_0": channels("Linear", symmetric=False)}},
    "overlapping": {
        "config_groups": {
            "group_0": channels("Linear", symmetric=True),
            "group_1": group("re:.*down_proj"),
            "group_2": group("model.layers.1.mlp.down_proj", symmetric=False, group_size=32),
        }
    },
}
for preset in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "MXFP8A16", "NVFP4A16"):
    SCHEMES[preset.lower()] = {"targets": "Linear", "scheme": preset}
for name, settings in SCHEMES.items():
    model = AutoModelForCausalLM.from_pretrained(FOLDERS / "original-bfloat16", dtype="auto")
    oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **settings))
    model.save_pretrained(FOLDERS / f"llmcompressor-{name}", save_compressed=True)
