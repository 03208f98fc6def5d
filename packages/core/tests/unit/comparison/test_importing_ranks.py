"""Global numbers for the batches, prompt parts, layers and experts of several ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.importing import number_ranks
from assay.dumps.protocol import Dump, DumpedTensor
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.sites import Site
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.comparison.memory_dump import make_dump, with_values
from packages.core.tests.unit.comparison.test_atb_against_torch import Network

IDS = [torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]), torch.tensor([[7], [8]])]
# Outputs that column-parallel modules divide, and inputs that row-parallel ones do.
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "act_fn")
ROWS = ("o_proj", "down_proj")

Part = tuple[Site, Tensor]
Spread = Callable[[DumpedTensor, Tensor], Iterator[Part]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    folder = tmp_path_factory.mktemp("dump")
    torch.manual_seed(0)
    network = Network()
    with torch.no_grad(), dumped(network, folder):
        for ids in IDS:
            network(ids)
    return open_dump(folder)


def on_ranks(dump: Dump, spread: Spread) -> Dump:
    """Return a dump whose tensors `spread` distributes over ranks."""
    tensors: list[DumpedTensor] = []
    for tensor in dump.tensors:
        for site, value in spread(tensor, tensor.read()):
            tensors.append(
                replace(
                    tensor, site=site, key=f"{site}", load=partial(value.view_as, value),
                    shape=tuple(value.shape), order=len(tensors),
                )
            )  # fmt: skip
    return replace(dump, path=Path("ranks"), tensors=tensors)


def at_rank(site: Site, rank: int, **changes: object) -> Site:
    return Site(replace(site.at, rank=rank, **changes), site.port)  # type: ignore[arg-type]


def tensor_parallel(number: int, *, partial: bool = False) -> Spread:
    def spread(tensor: DumpedTensor, value: Tensor) -> Iterator[Part]:
        name, port = tensor.site.at.module.rpartition(".")[2], tensor.site.port
        is_output = port == "output"
        divides = (name in COLUMNS and (is_output or name == "act_fn")) or (
            name in ROWS and not is_output
        )
        for rank in range(number):
            part = value.chunk(number, -1)[rank] if divides else value
            if partial and name in ROWS and is_output:
                # Unrelated summands.
                part = value * (1.0 if rank else 2.0 - number) + (rank * 2 - number + 1)
            yield at_rank(tensor.site, rank), part

    return spread


def pipeline(*, local: bool) -> Spread:
    def spread(tensor: DumpedTensor, value: Tensor) -> Iterator[Part]:
        parts = tensor.site.at.module.split(".")
        layer = int(parts[1]) if parts[0] == "layers" else None
        rank = int(layer >= 2) if layer is not None else int(parts[0] != "embed_tokens")
        if local and layer == 2:
            parts[1] = "0"
        yield at_rank(tensor.site, rank, module=".".join(parts)), value

    return spread


def data_parallel(tensor: DumpedTensor, value: Tensor) -> Iterator[Part]:
    for rank in range(2):
        yield at_rank(tensor.site, rank), value[rank : rank + 1]


LAYOUTS: dict[str, Spread] = {
    "tp=2": tensor_parallel(2),
    "tp=4": tensor_parallel(4),
    "tp=2 partial": tensor_parallel(2, partial=True),
    "pp=2": pipeline(local=False),
    "pp=2 local": pipeline(local=True),
    "dp=2": data_parallel,
}


def judge(expected: Dump, actual: Dump) -> Verdict:
    return compare_dumps(CompareOptions("", ""), expected, actual, SilentProgress()).verdict


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_agrees_with_one_process(whole: Dump, layout: str) -> None:
    spread = on_ranks(whole, LAYOUTS[layout])
    for verdict in judge(whole, spread), judge(spread, whole), judge(spread, spread):
        assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.unmatched)


@pytest.mark.parametrize(("one", "other"), [*permutations(LAYOUTS, 2)])
def test_layouts_agree_with_each_other(whole: Dump, one: str, other: str) -> None:
    verdict = judge(on_ranks(whole, LAYOUTS[one]), on_ranks(whole, LAYOUTS[other]))
    assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.unmatched)


@pytest.mark.parametrize("expected", [None, "tp=4", "dp=2"])
def test_a_fault_on_one_rank_is_located_with_its_rank(whole: Dump, expected: str | None) -> None:
    def spoil(tensor: DumpedTensor, value: Tensor) -> Iterator[Part]:
        for site, part in tensor_parallel(2)(tensor, value):
            wrong = site.at.module == "layers.1.mlp.up_proj" and site.port == "output"
            yield site, part * 1.05 if wrong and site.at.rank == 1 else part

    side = on_ranks(whole, LAYOUTS[expected]) if expected else whole
    verdict = judge(side, on_ranks(whole, spoil))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.rank) == ("layers.1.mlp.up_proj", 1)


def test_a_noise_dump_of_one_process_serves_ranks(whole: Dump) -> None:
    rounded = {one.key: one.read() for one in whole.tensors}
    rounded = {
        key: value * (1 + 1e-7 * torch.randn(value.shape)) if value.is_floating_point() else value
        for key, value in rounded.items()
    }
    noise = replace(with_values(whole, rounded), path=Path("noise"))
    comparison = CompareOptions("", "", noise="noise")
    spread = on_ranks(noise, LAYOUTS["tp=2"])
    verdict = compare_dumps(comparison, whole, spread, SilentProgress(), noise).verdict
    assert verdict.verdict is Outcome.PASS, verdict.headline


def test_values_that_pipeline_stages_pass_on_are_dropped() -> None:
    """Each stage records the whole model, whose inputs and outputs are hidden states in between."""
    ends = ("model", "input.0", 0), ("model", "output", 0)
    held = (
        [("embed", "output", 0), ("layers.0", "output", 0), *ends],
        [("layers.1", "output", 0), ("head", "output", 0), *ends],
    )
    sides = [make_dump(dict.fromkeys(sites, torch.ones(1))) for sites in held]
    tensors = [
        replace(one, site=at_rank(one.site, rank))
        for rank, side in enumerate(sides)
        for one in side.tensors
    ]
    numbered = number_ranks(replace(sides[0], tensors=tensors))
    kept = [
        (one.world_rank, one.site.port) for one in numbered.tensors if one.site.at.module == "model"
    ]
    assert kept == [(0, "input.0"), (1, "output")]
    assert numbered.notes == ["memory: 2 pipeline stages hold different layers"]


def test_a_layout_of_an_unknown_axis_does_not_keep_a_parameter_of_a_group_in_place() -> None:
    def side(rank: int) -> list[DumpedTensor]:
        ids, weight = torch.tensor([[rank, 5]]), torch.ones(4)
        held = make_dump({("embed", "input.0", 0): ids, ("embed", "parameter.weight", 0): weight})
        return [replace(one, site=at_rank(one.site, rank), layout="h[tp]") for one in held.tensors]

    dump = make_dump({})
    numbered = number_ranks(replace(dump, tensors=[*side(0), *side(1)]))
    places = [
        (one.site.port, one.site.at.micro_batch, one.site.at.rank) for one in numbered.tensors
    ]
    assert places == [
        ("input.0", 0, 0), ("parameter.weight", 0, 0),
        ("input.0", 1, 0), ("parameter.weight", 1, 0),
    ]  # fmt: skip
