"""Times of prefill and decode.

Shapes: B rows, T tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.devices.base import Device
from assay.inputs import built_in_texts
from assay.models import LoadedModel
from assay_bench.performance.suites.measurement import Amounts, SuiteTimer, count_flops

NUM_ROWS = 2
PROMPT_LENGTH = 128
NUM_NEW_TOKENS = 16


@pytest.fixture(scope="module")
def prompts_BT(loaded: LoadedModel, device: Device) -> Tensor:
    """Make prompts, shortened to the model's context; skip models that do not generate."""
    if not loaded.can_generate:
        pytest.skip(f"{loaded.source.reference} does not generate")
    longest = (loaded.max_positions or PROMPT_LENGTH + NUM_NEW_TOKENS) - NUM_NEW_TOKENS
    length = min(PROMPT_LENGTH, longest)
    ids = loaded.encode("\n".join(built_in_texts()))[: NUM_ROWS * length]
    return torch.tensor(ids, device=device.torch_device).view(NUM_ROWS, -1)


class Generation:
    """The two parts of greedy generation."""

    def __init__(self, loaded: LoadedModel, device: Device) -> None:
        self._model: Any = loaded.model
        self._device = device

    @torch.no_grad()
    def prefill(self, prompts_BT: Tensor) -> Any:  # noqa: ANN401 - an output of transformers
        """Run whole prompts and return the output with its cache."""
        with self._device.execution():
            return self._model(input_ids=prompts_BT, use_cache=True)

    @torch.no_grad()
    def decode(self, output: Any) -> Tensor:  # noqa: ANN401 - an output of transformers
        """Generate token by token and return the last logits."""
        with self._device.execution():
            for _ in range(NUM_NEW_TOKENS):
                token_B1 = output.logits[:, -1:].argmax(-1)
                output = self._model(
                    input_ids=token_B1, past_key_values=output.past_key_values, use_cache=True
                )
        logits: Tensor = output.logits
        return logits


def test_prefill(
    measure: SuiteTimer, loaded: LoadedModel, device: Device, prompts_BT: Tensor
) -> None:
    """Run one forward pass over all prompts."""
    generation = Generation(loaded, device)
    assert generation.prefill(prompts_BT).logits.isfinite().all()
    flops = count_flops(lambda: generation.prefill(prompts_BT))
    measure(
        lambda: prompts_BT,
        generation.prefill,
        Amounts(num_tokens=prompts_BT.numel(), num_flops=flops),
    )


def test_decode(
    measure: SuiteTimer, loaded: LoadedModel, device: Device, prompts_BT: Tensor
) -> None:
    """Generate tokens one by one. Each reads at least the weights."""
    generation = Generation(loaded, device)
    output = generation.prefill(prompts_BT)
    flops = count_flops(lambda: generation.decode(output))
    weight_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert weight_bytes > 0
    measure(
        lambda: generation.prefill(prompts_BT),
        generation.decode,
        Amounts(
            num_tokens=len(prompts_BT) * NUM_NEW_TOKENS,
            num_flops=flops,
            num_bytes=weight_bytes * NUM_NEW_TOKENS,
        ),
    )
