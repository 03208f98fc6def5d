"""python -m packages.core.tests.foreign.making.capture_fms MODELS TRACES, with ibm-fms 1.13.1."""

import torch
from fms.models import get_model

import assay
from packages.core.tests.foreign.making.inputs import IDS, folders

for folder, trace in folders("fms", "llama"):
    model = get_model(
        "hf_pretrained", str(folder), data_type=torch.float32, device_type="cpu"
    ).eval()
    with torch.no_grad(), assay.capture(model, trace):
        model(IDS)
