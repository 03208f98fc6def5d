"""Complex values at module boundaries, as a rotary table may be: two real numbers each."""

from typing import Any

import torch
from torch import Tensor, nn

from packages.core.tests.unit.locating.conftest import MakeRig
from packages.core.tests.unit.locating.plants import do_nothing, replace_forward

NUMBERS = torch.arange(1024).reshape(1, 32, 32)


class Angles(nn.Module):
    """Unit complex numbers, computed in float32 whatever the dtype of the model."""

    def forward(self, positions: Tensor) -> Tensor:
        angle = positions.float() / 7
        return torch.polar(torch.ones_like(angle), angle)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 32))

    def forward(self, input_ids: Tensor) -> Any:
        turned = self.angles(input_ids) * self.weight.float()
        return turned.real.to(self.weight.dtype)


def test_complex_values_are_held_to_the_rounding_of_float32(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))

    clean = rig.replay(do_nothing).ports["angles", "output"]

    assert clean.exact.num_compared == 0
    assert clean.dtype == "float32"
    assert 0 < clean.sums.relative_error < 2**-18  # of angles up to 146
    assert rig.failed(do_nothing) == set()


def test_wrong_phase_of_a_complex_table_fails_where_it_is_made(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))
    plant = replace_forward("angles", lambda _module, original, x: original(x) * 1.0001j / 1j)

    assert rig.failed(plant) == {"angles"}


def test_complex_values_in_place_of_real_ones_differ(make_rig: MakeRig) -> None:
    rig = make_rig(Rotated(), lambda model: model(NUMBERS))
    plant = replace_forward("angles", lambda _module, original, x: original(x).real)

    assert rig.replay(plant).ports["angles", "output"].exact.num_different > 0
