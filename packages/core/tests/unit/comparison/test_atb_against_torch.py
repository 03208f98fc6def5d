"""A dump of a PyTorch model against a dump of an accelerator graph with other names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers.atb import write_operation
from packages.core.tests.dump_writers.msprobe import dumped

WIDTH, HIDDEN, LAYERS = 8, 12, 3
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.q_proj(x) * self.k_proj(x).sigmoid() + self.v_proj(x)
        result: Tensor = self.o_proj(mixed)
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.act_fn = nn.SiLU()
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.lm_head(self.norm(x))
        return result


def write_graph(token: Path, network: Any, ids: Tensor, first: int) -> None:
    """Run the network on flattened tokens, and write it as a graph numbered from `first`."""

    def write(operation: str, value: Tensor, result: Tensor) -> Tensor:
        number, _, rest = operation.partition("_")
        write_operation(token, f"{int(number) + first}_{rest}", [value], [result])
        return result

    x = network.embed_tokens(ids.flatten())
    write("0_WordEmbeddingOperation", ids.flatten().float(), x)
    for number, layer in enumerate(network.layers, 1):
        at = f"{number}_DecoderLayer"
        attention, mlp, start = layer.self_attn, layer.mlp, x
        norm = write(f"{at}/0_LayerNormOperation", x, layer.input_layernorm(x))
        parts = [attention.q_proj(norm), attention.k_proj(norm), attention.v_proj(norm)]
        write(f"{at}/1_LinearOperation", norm, torch.cat(parts, -1))
        mixed = parts[0] * parts[1].sigmoid() + parts[2]
        write(f"{at}/2_SelfAttentionOperation", parts[0], mixed)
        x = x + write(f"{at}/3_LinearOperation", mixed, attention.o_proj(mixed))
        norm = write(f"{at}/4_LayerNormOperation", x, layer.post_attention_layernorm(x))
        gate, up = mlp.gate_proj(norm), mlp.up_proj(norm)
        write(f"{at}/5_LinearOperation", norm, torch.cat([gate, up], -1))
        active = write(f"{at}/6_ActivationOperation", gate, mlp.act_fn(gate))
        x = x + write(f"{at}/7_LinearOperation", active * up, mlp.down_proj(active * up))
        write(at, start, x)
    norm = write(f"{LAYERS + 1}_LayerNormOperation", x, network.norm(x))
    write(f"{LAYERS + 2}_LmHeadOperation", norm, network.lm_head(norm))


DECODE = LAYERS + 3  # number of the first operation of the decode graph
Folders = list[list[tuple[Tensor, int]]]
STEPS = [torch.tensor([[2]]), torch.tensor([[7]])]
LAYOUTS: dict[str, Folders] = {
    "prefill and decode in folder 0": [[(PROMPT, 0), (STEPS[0], DECODE)], [(STEPS[1], DECODE)]],
    "with a warm-up": [
        [(torch.tensor([[8, 8, 8, 8, 8, 8]]), 0), (torch.tensor([[8]]), DECODE)],
        [(PROMPT, 0), (STEPS[0], DECODE)],
        [(STEPS[1], DECODE)],
    ],
    "without a shift": [[(PROMPT, 0)], [(STEPS[0], 0)], [(STEPS[1], 0)]],
}


def judge(
    folder: Path, layout: Folders, change: Callable[[Any], object] = lambda _: None
) -> Verdict:
    torch.manual_seed(0)
    network = Network()
    with torch.no_grad():
        with dumped(network, folder / "torch"):
            for ids in (PROMPT, *STEPS):
                network(ids)
        change(network)
        for number, graphs in enumerate(layout):
            token = folder / "atb" / "msit_dump_20260101_000000" / "tensors" / "0_77" / str(number)
            for ids, first in graphs:
                write_graph(token, network, ids, first)
    (folder / "out").mkdir()
    comparison = CompareOptions(str(folder / "torch"), str(folder / "atb"))
    return compare(comparison, folder / "out", SilentProgress())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_of_the_same_model_agrees(tmp_path: Path, layout: str) -> None:
    verdict = judge(tmp_path, LAYOUTS[layout])
    assert verdict.verdict is Outcome.NOT_COMPARED, verdict.headline
    assert str(verdict.headline).startswith("Everything with a partner agrees")
    # Results of containers and of what the graph fuses have no partner; all projections have one.
    missing = {name.partition(":")[0].rpartition(".")[2] for name in verdict.unmatched.expected}
    assert missing <= {"self_attn", "mlp", "act_fn"}
    assert any("matched by order" in note for note in verdict.notes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.down_proj", "self_attn.k_proj"])
def test_a_fault_is_located_under_the_name_of_the_model(
    tmp_path: Path, layout: str, module: str
) -> None:
    def scale(network: Any) -> None:
        network.layers[1].get_submodule(module).weight *= 1.05

    verdict = judge(tmp_path, LAYOUTS[layout], scale)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert verdict.location.module == f"layers.1.{module}"
