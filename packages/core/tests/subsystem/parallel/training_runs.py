"""Two training steps of a model, and their results as whole tensors by name.

Beside training_steps.py: the loss is that of transformers, with a router's own part, and float64
judges it on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.parallel.pipeline import clip_gradients
from packages.core.tests.subsystem.parallel.judging import differing, plain
from packages.core.tests.subsystem.parallel.tiny_models import batch

NUM_STEPS = 2
# Below the norms of the gradients here, 1 to 8: both steps are clipped.
MAX_NORM = 0.5

Results = dict[str, Tensor]


def train(
    model: nn.Module, device: str = "cpu", clip: Callable[..., Tensor] = clip_gradients
) -> Results:
    """Loss, gradients before clipping, norm and updated weights."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A large eps keeps the update a smooth function of gradients near zero. With 1e-5 the rounding of
    # one element of an adapter (phi3, tp=4) came out as 19 times the noise on one processor.
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, eps=1e-3, foreach=False)
    results = {}
    for step in range(NUM_STEPS):
        loss = model(**{name: value.to(device) for name, value in batch(step).items()}).loss
        loss.backward()
        results[f"loss {step}"] = plain(loss)
        for name, parameter in trained.items():
            assert parameter.grad is not None, name
            results[f"gradient {step} {name}"] = plain(parameter.grad)
        results[f"norm {step}"] = plain(clip(trained.values(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return results | {f"weight {name}": plain(parameter) for name, parameter in trained.items()}


def clip_by_torch(parameters: list[Tensor], max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=False)


@dataclass(frozen=True)
class Oracle:
    """The same training on one process: as it is on the device, and in float64."""

    noise: Results
    exact: Results


def train_whole(build: Callable[[], nn.Module], device: str) -> Oracle:
    return Oracle(
        noise=train(build().to(device), device, clip=clip_by_torch),
        exact=train(build().double(), clip=clip_by_torch),
    )


def differing_after_training(
    oracle: Oracle, model: nn.Module, device: str, divide: Callable[[nn.Module], object]
) -> list[str]:
    """What differs in a model that is divided before it trains; names of parameters stay."""
    names = [name for name, _ in model.named_parameters()]
    model = model.to(device)
    divide(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return differing(train(model, device), oracle.noise, oracle.exact)
