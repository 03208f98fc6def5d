from dataclasses import replace

import torch
from torch import Tensor

from assay.dumps.protocol import Dump
from assay.offline.contents import find_lost_ranks
from packages.core.tests.unit.offline.memory_dump import make_dump

WHOLE = torch.linspace(-1, 1, 32).reshape(1, 2, 16)


def on_ranks(*parts: Tensor) -> Dump:
    """Return a dump in which three modules hold one part on each rank."""
    dump = make_dump(
        {
            (f"layers.{layer}.{rank}", "output", 0): part
            for layer in range(3)
            for rank, part in enumerate(parts)
        }
    )
    moved = []
    for one in dump.tensors:
        module, _, rank = one.site.at.module.rpartition(".")
        site = replace(one.site, at=replace(one.site.at, module=module, rank=int(rank)))
        moved.append(replace(one, site=site))
    return replace(dump, tensors=moved)


SHARDS = WHOLE.chunk(4, dim=-1)
SUMMANDS = (WHOLE * 0.75, WHOLE * 0.25)


def test_missing_shards_are_lost() -> None:
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(*SHARDS[:2])) == {2, 3}
    assert find_lost_ranks(on_ranks(*SUMMANDS), on_ranks(SUMMANDS[0])) == {1}


def test_another_layout_has_lost_no_rank() -> None:
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(*WHOLE.chunk(2, dim=-1))) == set()
    assert find_lost_ranks(on_ranks(*SHARDS), on_ranks(WHOLE)) == set()
    assert find_lost_ranks(on_ranks(*SUMMANDS), on_ranks(WHOLE)) == set()


def test_fewer_replicas_are_not_lost_ranks() -> None:
    assert find_lost_ranks(on_ranks(WHOLE, WHOLE), on_ranks(WHOLE)) == set()
