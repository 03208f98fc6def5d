"""python -m packages.core.tests.foreign.making.quantize_bitsandbytes FOLDERS, with bitsandbytes 0.50.2."""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOLDERS = Path(sys.argv[1])
NF4: dict[str, Any] = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
}  # fmt: skip
for name, dtype, settings in (
    ("nf4-double", "bfloat16", NF4),
    ("fp4", "bfloat16", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    ("int8", "bfloat16", {"load_in_8bit": True}),
    ("int8-float32", "float32", {"load_in_8bit": True}),
):
    model = AutoModelForCausalLM.from_pretrained(
        FOLDERS / f"original-{dtype}",
        quantization_config=BitsAndBytesConfig(**settings),
        dtype="auto",
    )
    model.save_pretrained(FOLDERS / f"bitsandbytes-{name}")
