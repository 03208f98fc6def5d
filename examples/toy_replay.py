"""Find a wrong weight by replay: one pass, each layer from the reference's values."""

import torch
from torch import nn

torch.manual_seed(0)
reference = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).double()
candidate = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
candidate.load_state_dict(reference.state_dict())
candidate.get_parameter("1.weight").data *= 1.02

value = torch.randn(8, 64)
for path, layer in candidate.named_children():
    expected = reference.get_submodule(path)(value.double())
    error = (layer(value) - expected).norm() / expected.norm()
    print(f"{path}: {error:.0e}")
    value = expected.float()
