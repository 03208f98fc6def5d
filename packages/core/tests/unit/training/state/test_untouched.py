import torch
from torch import nn

from assay.training.state.parameter_records import Untouched


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.ones(3, 2, 2))
        self.plain = nn.Parameter(torch.ones(2, 2))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_what_no_step_reached_is_named_expert_by_expert() -> None:
    model, untouched = Experts(), Untouched()
    for expert in (0, 2):
        model.zero_grad()
        (model.stacked[expert].sum() + model.plain[0].sum()).backward()
        untouched.add(model)

    assert untouched.names == ["stacked.1", "unused"]


def test_nothing_is_named_where_all_were_reached() -> None:
    model, untouched = Experts(), Untouched()
    (model.stacked.sum() + model.plain.sum() + model.unused.sum()).backward()
    untouched.add(model)

    assert untouched.names == []
