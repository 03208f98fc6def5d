#!/usr/bin/env bash
# torch 2.13.0's parallelize_module divides a fused projection as one weight.
#
# A gated MLP with one weight for gate and up splits its output in two halves. `ColwiseParallel` gives each rank
# consecutive features of the whole: on two ranks, the first has the gate and the second has up. Each then takes half
# of its own features for the gate, and the result is wrong, without an error or a warning. The same MLP with two
# weights is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$folder/divide.py" <<'PYTHON'

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for mlp in (Apart, Fused):
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(3, 8)
    expected = model(x)
    plan = {name: ColwiseParallel() for name, _ in model.named_children()}
    actual = parallelize_module(model, mesh, plan | {"down": RowwiseParallel()})(x)
    error = float(((actual - expected).norm() / expected.norm()).detach())
    if dist.get_rank() == 0:
        print(f"{mlp.__name__}:", "equal" if error < 1e-6 else f"differs by {error:.0%}")
dist.destroy_process_group()
PYTHON

"$folder/env/bin/torchrun" --standalone --nproc-per-node 2 "$folder/divide.py" 2>"$folder/errors" | tee "$folder/seen" ||
  { cat "$folder/errors"; exit 1; }

diff "$folder/seen" - <<'SEEN'
Apart: equal
Fused: differs by 91%
SEEN
