"""The simulated device under whole Hugging Face models: prefill, decode, gradients."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from assay.devices.sim import SimDevice

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama, sdpa": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"attn_implementation": "sdpa"})),
    "llama, eager": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES | {"attn_implementation": "eager"})
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module = MODELS[request.param]().to(torch.bfloat16).eval()
    return made


def logits_of(
    model: torch.nn.Module,
    execution: AbstractContextManager[None],
    gradient_mode: Callable[[], AbstractContextManager[None]] = torch.no_grad,
) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES["vocab_size"], (3, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with gradient_mode(), execution:
        logits: Tensor = model(ids, attention_mask=mask).logits
    # Rows of padding are not compared: eager attention makes them NaN in some dtypes.
    return logits.detach().clone()[mask.bool()].double()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_forward_pass_is_simulated_alike_in_every_gradient_mode(model: torch.nn.Module) -> None:
    host = logits_of(model, nullcontext())
    simulated = [
        logits_of(model, SimDevice("split4").execution(), mode)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode)
    ]
    assert torch.equal(simulated[0], simulated[1])
    assert torch.equal(simulated[0], simulated[2])
    assert not torch.equal(simulated[0], host)
    assert torch.equal(logits_of(model, nullcontext()), host)


def test_healthy_variants_err_about_as_much_as_the_host_and_fp8_much_more(
    model: torch.nn.Module,
) -> None:
    host = logits_of(model, nullcontext())
    exact = logits_of(copy.deepcopy(model).float(), nullcontext())
    noise = relative_error(host, exact)
    assert noise > 1e-3

    def ratio(variant: str) -> float:
        simulated = logits_of(model, SimDevice(variant).execution())
        return relative_error(simulated, exact) / noise

    assert 0.5 < ratio("split2") < 3
    assert 0.5 < ratio("split4") < 3
    assert 0.5 < ratio("truncate") < 3
    assert ratio("fp8") > 4


def test_generation_with_a_cache_is_simulated_and_repeats(model: torch.nn.Module) -> None:
    ids = torch.arange(1, 9).reshape(2, 4)
    generate: Any = model.generate

    def scores(execution: AbstractContextManager[None]) -> Tensor:
        with execution:
            made = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=5,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return torch.stack(made.logits)

    first, second = scores(SimDevice().execution()), scores(SimDevice().execution())
    assert torch.equal(first, second)
    assert not torch.equal(first, scores(nullcontext()))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_simulated_however_they_are_multiplied(implementation: str) -> None:
    torch.manual_seed(0)
    mixtral: Any = MODELS["mixtral"]().to(torch.bfloat16).eval()
    mixtral.set_experts_implementation(implementation)
    experts = mixtral.model.layers[0].mlp.experts
    tokens = torch.randn(6, SIZES["hidden_size"]).bfloat16()
    index = torch.tensor([[0, 1]] * 6)
    weights = torch.full((6, 2), 0.5, dtype=torch.bfloat16)
    with torch.no_grad():
        host = experts(tokens, index, weights).double()
        with SimDevice("split4").execution():
            simulated = experts(tokens, index, weights).double()
    assert 1e-4 < relative_error(simulated, host) < 2e-2


def test_gradients_are_simulated_and_as_good_as_the_hosts(model: torch.nn.Module) -> None:
    ids = torch.arange(1, 25).reshape(2, 12)

    def gradients(trained: Any, execution: AbstractContextManager[None]) -> Tensor:
        trained.zero_grad()
        with execution:
            trained(ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten().double() for p in trained.parameters()])

    host = gradients(model, nullcontext())
    simulated = gradients(model, SimDevice("split4").execution())
    exact = gradients(copy.deepcopy(model).float(), nullcontext())
    assert not torch.equal(simulated, host)
    assert relative_error(simulated, exact) < 3 * relative_error(host, exact)


def test_sharded_tensors_are_simulated_on_their_shards(tmp_path: Path) -> None:
    """A DTensor plans its product with fake tensors and makes it with its own shards."""
    left = torch.tensor([[256, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bfloat16)
    right = torch.ones(8, 2, dtype=torch.bfloat16)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(left, mesh, [Replicate()])
        columns = distribute_tensor(right, mesh, [Shard(1)])
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), SimDevice("split4").execution():
                product: Any = whole @ columns
            # 260 in one rounding, 256 in four parts: see test_arithmetic.py.
            assert product.full_tensor().tolist() == [[256, 256]]
    finally:
        torch.distributed.destroy_process_group()
