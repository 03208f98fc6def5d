"""python -m packages.core.tests.foreign.making.capture_transformers MODELS TRACES, with transformers 5.23."""

import torch
from transformers import AutoModelForCausalLM

import assay
from packages.core.tests.foreign.making.inputs import IDS, MODELS, TRACES

for name in ("llama", "llama-32", "qwen3", "mixtral"):
    folder = MODELS / name / "clean"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad(), assay.capture(model, TRACES / f"transformers-{name}"):
        model(IDS)
    with torch.no_grad(), assay.capture(model, TRACES / f"transformers-{name}-generate"):
        model.generate(IDS, max_new_tokens=4, do_sample=False)
