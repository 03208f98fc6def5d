"""Rows inside fused experts, in other orders and calls."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump
from assay.models import load_model
from assay.runs import SilentProgress
from assay.sites import Site
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.comparison.memory_dump import make_dump

EXPERTS = "model.layers.1.mlp.experts"
LENGTH = 14
# Groups of prompts, lengths of the passes, and the implementation of the experts.
LAYOUTS: dict[str, tuple[Sequence[Sequence[int]], Sequence[int], str]] = {
    "as it comes": ([[0, 1, 2]], [12, 1, 1], "grouped_mm"),
    "each prompt alone": ([[0], [1], [2]], [12, 1, 1], "grouped_mm"),
    "another order": ([[2, 0, 1]], [12, 1, 1], "grouped_mm"),
    "chunked prefill": ([[0, 1, 2]], [5, 7, 1, 1], "grouped_mm"),
    "eager": ([[0, 1, 2]], [12, 1, 1], "eager"),
    "eager, each prompt alone": ([[0], [1], [2]], [12, 1, 1], "eager"),
    "batched": ([[0, 1, 2]], [12, 1, 1], "batched_mm"),
}


@cache
def loaded(dtype: str) -> Any:
    return load_model("micro:mixtral", dtype=dtype).model


def run(folder: Path, layout: str, dtype: str, plant: Callable[[Any], None] | None = None) -> Dump:
    groups, lengths, implementation = LAYOUTS[layout]
    model = deepcopy(loaded(dtype))
    model.set_experts_implementation(implementation)
    if plant is not None:
        plant(model)
    text = "The noise of a correct run decides what is a fault, token by token."
    ids = torch.tensor([[ord(c) for c in text[at : at + LENGTH]] for at in (0, 20, 40)])
    with torch.no_grad(), dumped(model, folder):
        for group in groups:
            cache = None
            for part in ids[list(group)].split(list(lengths), dim=1):
                cache = model(part, past_key_values=cache, use_cache=True).past_key_values
    return open_dump(folder)


def judge(expected: Dump, actual: Dump) -> Verdict:
    return compare_dumps(CompareOptions("", ""), expected, actual, SilentProgress()).verdict


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return run(tmp_path_factory.mktemp("expected") / request.param, "as it comes", request.param)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_tokens_agree(expected: Dump, tmp_path: Path, layout: str) -> None:
    actual = run(tmp_path, layout, expected.path.name)
    for verdict in judge(expected, actual), judge(actual, expected):
        assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.unmatched)


def wrong_activation(model: Any) -> None:
    """Scale the activation of the third expert in the eager implementation."""
    experts = model.get_submodule(EXPERTS)
    calls: list[Tensor] = []

    def scale(_module: Any, _args: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output * 1.5 if len(calls) == 3 else output

    experts.register_forward_pre_hook(lambda *_: calls.clear())
    experts.act_fn.register_forward_hook(scale)


def wrong_down_projection(model: Any) -> None:
    model.get_submodule(EXPERTS).down_proj.data[3] *= 1.5


@pytest.mark.parametrize(
    ("plant", "layouts", "module"),
    [
        (wrong_activation, ("eager", "eager, each prompt alone"), f"{EXPERTS}.act_fn"),
        (wrong_down_projection, ("as it comes", "chunked prefill", "batched"), EXPERTS),
    ],
)
def test_a_fault_of_one_expert_is_located(
    expected: Dump,
    tmp_path: Path,
    plant: Callable[[Any], None],
    layouts: Sequence[str],
    module: str,
) -> None:
    for layout in layouts:
        verdict = judge(expected, run(tmp_path / layout, layout, expected.path.name, plant))
        assert verdict.verdict is Outcome.FAIL, layout
        assert verdict.location is not None
        assert verdict.location.module == module, layout


def test_without_choices_each_port_is_listed_once(expected: Dump, tmp_path: Path) -> None:
    actual = run(tmp_path, "each prompt alone", expected.path.name)
    sides = [
        replace(one, tensors=[t for t in one.tensors if t.dtype != "int64" or "mlp" not in t.key])
        for one in (expected, actual)
    ]
    verdict = judge(*sides)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.unmatched.expected == [
        f"model.layers.{layer}.mlp.experts.act_fn:{port}: the recorded expert choices do not tell the"
        " tokens of its rows"
        for layer in range(4)
        for port in ("input.0", "output")
    ]


TOKENS, NUM_EXPERTS, WIDTH = 7, 4, 8
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(TOKENS, WIDTH, generator=GENERATOR)
ROUTER = torch.randn(WIDTH, NUM_EXPERTS, generator=GENERATOR)
WEIGHTS = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=GENERATOR)
# The second and third experts of the token TIED have scores that differ by less than rounding.
TIED = 5


def routed(sign: float = 1.0, error: float = 0.0) -> Dump:
    """Return a dump of one layer. sign: winner of the tie; error: error of the first row's activation."""
    scores = X @ ROUTER
    top = scores[TIED].topk(3).indices
    scores[TIED, top[2]] = scores[TIED, top[1]] - sign * 5e-7
    chosen = scores.topk(2, dim=-1).indices
    order = chosen.flatten().argsort(stable=True)
    rows = torch.stack([X[n // 2] @ WEIGHTS[chosen.flatten()[n]] for n in order.tolist()])
    active = functional.silu(rows)
    active[0] *= 1 + error
    result = torch.zeros(TOKENS, WIDTH).index_add_(0, order // 2, active)
    return make_dump(
        {
            ("embed", "input.0", 0): torch.arange(TOKENS)[None],
            ("embed", "output", 0): X[None],
            ("layers.0.gate", "output.0", 0): scores,
            ("layers.0.gate", "output.1", 0): chosen,
            ("layers.0.experts.act_fn", "input.0", 0): rows,
            ("layers.0.experts.act_fn", "output", 0): active,
            ("layers.0.experts", "output", 0): result,
        }
    )


def test_the_rows_of_a_near_tie_are_left_out() -> None:
    verdict = judge(routed(), routed(sign=-1.0))
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.levels)
    assert "differ at near ties: 1, first in layers.0.gate" in verdict.notes[0]


def test_a_wrong_row_is_seen_next_to_a_near_tie() -> None:
    verdict = judge(routed(), routed(sign=-1.0, error=0.02))
    assert verdict.location is not None
    assert verdict.location.module == "layers.0.experts.act_fn"


def test_rows_on_two_ranks_are_put_together() -> None:
    whole = routed()
    tensors = []
    for tensor in whole.tensors:
        for rank in range(2):
            value = tensor.read()
            if tensor.site.at.module.endswith("act_fn"):
                value = value.chunk(2, -1)[rank]
            site = Site(replace(tensor.site.at, rank=rank), tensor.site.port)
            load, shape = partial(value.view_as, value), tuple(value.shape)
            tensors.append(replace(tensor, site=site, load=load, shape=shape))
    actual = replace(whole, tensors=tensors)
    verdict = judge(routed(sign=-1.0), actual)
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.unmatched)
