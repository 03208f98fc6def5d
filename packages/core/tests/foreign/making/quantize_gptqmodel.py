"""python -m packages.core.tests.foreign.making.quantize_gptqmodel FOLDERS, with GPTQModel 7.7.0.

It refuses to be imported with two processor cores; set `"model_loader:cpu": 1` in its `__init__.py` there.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from gptqmodel import GPTQModel, QuantizeConfig

FOLDERS = Path(sys.argv[1])
GENERATOR = torch.Generator().manual_seed(0)
TEXTS = torch.randint(3, 250, (24, 1, 96), generator=GENERATOR)
SETTINGS: dict[str, dict[str, Any]] = {
    "act-order": {"desc_act": True},
    "asym": {"sym": False},
    "dynamic": {
        "dynamic": {
            r"+:.*\.1\.mlp\.down_proj": {"bits": 8, "group_size": 64},
            r"-:.*\.0\.self_attn\.k_proj": {},
        }
    },
}
for name, settings in SETTINGS.items():
    config = QuantizeConfig(bits=4, group_size=32, **settings)
    model = GPTQModel.load(str(FOLDERS / "original-bfloat16"), config, device="cpu")
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in TEXTS]
    model.quantize(data, batch_size=4)
    model.save(str(FOLDERS / f"gptqmodel-{name}"))
