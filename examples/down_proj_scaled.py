"""A planted fault: the weights of one projection are 2 % too large.

    assay check generate micro:llama --reference cpu/float32 --candidate cpu/bfloat16 \
        --candidate-setup examples/down_proj_scaled.py:plant

The verdict is FAIL at model.layers.1.mlp.down_proj.
"""

import torch


def plant(model: torch.nn.Module) -> None:
    """Scale the weights of layer 1's down_proj by 1.02, in place."""
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.down_proj").get_parameter("weight").mul_(1.02)
