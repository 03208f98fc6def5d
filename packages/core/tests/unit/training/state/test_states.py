import copy
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.training.protocol import Trainer
from assay.training.reports import HeldPart, KeptPrecision
from assay.training.state.files import read_state, write_state
from assay.training.state.states import (
    DrawnGenerators,
    Untouched,
    collect_state,
    differing_parameters,
    find_kept_narrow,
    fits,
    generator_states,
    hash_held_parts,
    inject_state,
    measure_buffers,
    plain_name,
    restore_generators,
    round_state,
    rounded_weights,
    shared_parameters,
    trajectory_of,
    unsaved_buffers,
)


def draw() -> tuple[float, float, float, float]:
    normal = float(np.random.standard_normal())  # noqa: NPY002 - the generator that is restored
    return random.random(), normal, float(torch.rand(1)), random.gauss(0, 1)  # noqa: S311


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    draw()  # leaves half of a pair of normal numbers in NumPy and Python
    write_state(tmp_path / "states", generator_states("cpu"))
    expected = [draw(), draw()]
    assert [draw(), draw()] != expected
    restore_generators(read_state(tmp_path / "states"), "cpu")
    assert [draw(), draw()] == expected


def test_generators_that_a_step_draws_from_are_named() -> None:
    drawn = DrawnGenerators("cpu")
    with drawn.observed():
        torch.rand(1)
    random.random()  # noqa: S311 - between two steps
    with drawn.observed():
        np.random.standard_normal()  # noqa: NPY002

    assert drawn.names == {"numpy", "torch"}


class Small:
    """The part of a trainer that is asked for its state; what is never called is left out."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    setup: Any
    step: Any
    save: Any
    load: Any
    teardown: Any

    def train(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": generator_states("cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        restore_generators(state["generators"], "cpu")


class Reversed(Small):
    """Its optimizer holds the parameters in another order."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.optimizer = torch.optim.AdamW(list(self.model.parameters())[::-1], lr=0.1)


class Forgetful(Small):
    """It loads the parameters alone."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


class Refusing(Small):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("master_weights")


@pytest.fixture
def state() -> dict[str, Any]:
    trainer = Small(seed=1)
    trainer.train()
    return copy.deepcopy(collect_state(trainer, "cpu"))


@pytest.mark.parametrize("kind", [Small, Reversed])
def test_state_is_taken_over_by_name(kind: type[Small], state: dict[str, Any]) -> None:
    trainer = kind(seed=2)
    torch.rand(3)

    assert inject_state(trainer, state, "cpu") == []
    actual = collect_state(trainer, "cpu")
    assert set(actual["moments"]) == {"0.weight", "0.bias", "1.weight"}
    for name, moments in state["moments"].items():
        assert torch.equal(actual["moments"][name]["exp_avg"], moments["exp_avg"])
    assert torch.equal(torch.get_rng_state(), state["generators"]["torch"])


def test_what_a_trainer_does_not_load_is_named_and_loaded_all_the_same(
    state: dict[str, Any],
) -> None:
    trainer = Forgetful(seed=2)
    torch.rand(3)
    lost = {value.path: value.part for value in inject_state(trainer, state, "cpu")}

    assert lost["moments.0.weight.exp_avg"] == "moments"
    assert lost["generators.torch"] == "generators"
    assert "model" not in lost.values()
    assert torch.equal(
        trainer.optimizer.state[trainer.model.get_parameter("0.weight")]["exp_avg"],
        state["moments"]["0.weight"]["exp_avg"],
    )
    assert torch.equal(torch.get_rng_state(), state["generators"]["torch"])


def test_generator_that_a_trainer_does_not_keep_need_not_be_loaded(state: dict[str, Any]) -> None:
    class KeepsNoGenerator(Forgetful):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"generators": {}}

    torch.rand(3)
    lost = inject_state(KeepsNoGenerator(seed=2), state, "cpu")

    assert not [value for value in lost if value.part == "generators"]
    assert torch.equal(torch.get_rng_state(), state["generators"]["torch"])


def test_state_of_the_host_is_taken_over_on_an_accelerator(
    state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnAccelerator(Small):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"generators": generator_states("cuda")}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            super().load_state_dict(state)
            loaded.append(state["generators"]["device"])

    loaded: list[Tensor] = []
    own = torch.arange(16, dtype=torch.uint8)
    module = SimpleNamespace(
        get_rng_state=lambda _: own, set_rng_state=lambda *_: pytest.fail("not the reference's")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    assert inject_state(OnAccelerator(seed=2), state, "cuda") == []
    assert loaded == [own]


def test_refused_state_is_one_clear_error(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^load_state_dict of Refusing refuses .*master_weights"):
        inject_state(Refusing(), state, "cpu")


def test_rounded_state_can_be_held_in_the_dtype(state: dict[str, Any]) -> None:
    rounded = round_state(state, torch.bfloat16)

    weight, moments = rounded["model"]["0.weight"], rounded["moments"]["0.weight"]
    assert torch.equal(weight, state["model"]["0.weight"].bfloat16())
    assert torch.equal(moments["exp_avg_sq"], state["moments"]["0.weight"]["exp_avg_sq"].bfloat16())
    assert moments["step"] == 1


def test_weights_are_compared_as_their_dtype_rounds_them(state: dict[str, Any]) -> None:
    trainer = Small(seed=1)
    trainer.train()
    assert differing_parameters(state, trainer.model) == []

    assert differing_parameters(state, trainer.model.bfloat16()) == []
    with torch.no_grad():
        trainer.model.get_parameter("1.weight").mul_(1.01)
    assert differing_parameters(state, trainer.model) == ["1.weight"]


class WithFrequencies(nn.Module):
    """A module with one buffer in its state, and one outside of it."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("frequencies", frequencies, persistent=False)


def test_buffers_that_no_state_holds_are_compared_with_those_of_the_load() -> None:
    values = torch.tensor([1.0, 0.1])
    loaded = unsaved_buffers(WithFrequencies(values))
    assert list(loaded) == ["frequencies"]

    def measured(given: Tensor) -> tuple[list[str], list[str]]:
        found = measure_buffers(loaded, WithFrequencies(given), torch.float32)
        return [one.name for one in found.weights], found.replaced

    assert measured(values.clone()) == ([], [])
    assert measured(values * (1 + 2**-22)) == ([], [])  # of another device
    assert measured(values * 1.00001) == (["frequencies"], [])
    assert measured(values.bfloat16()) == ([], ["frequencies"])
    assert measured(values[:1]) == ([], ["frequencies"])
    assert measured(values.double()) == ([], [])  # wider: mixed precision
    assert measure_buffers({}, WithFrequencies(values), torch.float32).weights == []


def test_names_are_those_of_the_unwrapped_model() -> None:
    assert plain_name("base_model.model.model.norm.weight") == "model.norm.weight"
    assert plain_name("_orig_mod.lm_head.weight") == "lm_head.weight"
    assert plain_name("weight") == "weight"


def test_shared_parameters_are_grouped() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    assert shared_parameters(model) == []

    model["head"].weight = model["embed"].weight
    assert shared_parameters(model) == [["embed.weight", "head.weight"]]


END = {
    "trainable": ["weight"],
    "model": {"weight": torch.full((3, 5), 2.0), "bias": torch.zeros(3)},
}


@pytest.fixture
def model() -> nn.Linear:
    linear = nn.Linear(5, 3)
    with torch.no_grad():
        linear.weight.fill_(2.25)
    return linear


def test_distance_is_that_of_most_elements(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[0, :3] = torch.tensor([2.0, -9.0, 100.0])

    (row,) = trajectory_of(model, END)

    assert (row.parameter, row.error, row.size) == ("weight", 0.25, 2.0)


def test_parameter_that_is_not_finite_is_as_far_as_can_be(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[0, 0] = torch.nan

    assert trajectory_of(model, END)[0].error != trajectory_of(model, END)[0].error


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


BFLOAT16 = torch.bfloat16


def trainer(dtype: torch.dtype, moments: torch.dtype | None = None) -> Trainer:
    """A layer of which the bias is frozen, after one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight], lr=0.01)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = optimizer.state[model.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].to(moments or dtype)
    made: Any = SimpleNamespace(model=model, optimizer=optimizer)
    return cast("Trainer", made)


def with_copy(value: Tensor) -> Trainer:
    made = trainer(BFLOAT16, torch.float32)
    state = made.optimizer.state[made.model.get_parameter("weight")]
    state["exp_avg"] = state["exp_avg"].float()
    state["master"] = value
    return made


def test_what_is_kept_in_float32_is_not_narrow() -> None:
    assert find_kept_narrow(trainer(torch.float32)) == KeptPrecision()
    assert find_kept_narrow(trainer(torch.float64)) == KeptPrecision()


def test_moment_in_16_bits_is_narrow_beside_a_wide_parameter() -> None:
    assert find_kept_narrow(trainer(torch.float32, BFLOAT16)) == KeptPrecision(
        moments=["weight exp_avg_sq"]
    )


def test_parameter_in_16_bits_is_narrow_without_a_wide_copy_of_it() -> None:
    weight = trainer(BFLOAT16).model.get_parameter("weight").detach()

    assert find_kept_narrow(trainer(BFLOAT16)).parameters == ["weight"]
    # A copy rounds to the parameter: between two numbers of 16 bits is room for many.
    copied = find_kept_narrow(with_copy(weight.float() * (1 + 2.0**-11)))
    assert copied == KeptPrecision(copied=["weight"])
    assert find_kept_narrow(with_copy(weight.float() * 1.1)).parameters == ["weight"]
    assert find_kept_narrow(with_copy(weight.clone())).parameters == ["weight"]


def test_optimizer_that_holds_the_wide_copies_itself_has_them() -> None:
    made = trainer(BFLOAT16)
    copy = nn.Parameter(made.model.get_parameter("weight").detach().float())
    made.optimizer = torch.optim.AdamW([copy], lr=0.01)

    assert find_kept_narrow(made) == KeptPrecision(copied=["weight"])


@pytest.mark.parametrize("rounds", [False, True])
def test_weights_that_are_rounded_between_two_steps_are_found_by_the_next(*, rounds: bool) -> None:
    made = trainer(torch.float32)
    weight = made.model.get_parameter("weight")
    start = {"weight": weight.detach().clone()}

    with rounded_weights(made, start, BFLOAT16) as rounded:
        made.optimizer.step()
        if rounds:
            with torch.no_grad():
                weight.copy_(weight.bfloat16())
        made.optimizer.step()
    made.optimizer.step()

    assert rounded == ["weight"] * rounds


def test_weights_that_nothing_changes_are_not_rounded() -> None:
    made = trainer(torch.float32)
    with torch.no_grad():
        made.model.get_parameter("weight").fill_(1.0)
    made.optimizer.param_groups[0].update(lr=0.0)

    with rounded_weights(made, {"weight": torch.ones(3, 4)}, BFLOAT16) as rounded:
        made.optimizer.step()

    assert rounded == []


def test_value_fits_where_it_is_one_of_the_dtype() -> None:
    values = torch.tensor([0.0, 1.0, 1.0 + 2.0**-7, 1.0 + 2.0**-8, 3e38])

    assert fits(values, BFLOAT16).tolist() == [True, True, True, False, False]


def test_a_weight_and_its_moments_have_hashes_of_their_own() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer: Any = SimpleNamespace(state={model.weight: {"exp_avg": torch.ones(1, 2), "step": 1}})
    trainer: Any = SimpleNamespace(model=model, optimizer=optimizer)
    weight, moment = HeldPart("weight"), HeldPart("weight", "exp_avg")

    before = hash_held_parts(trainer)
    optimizer.state[model.weight]["exp_avg"] += 1
    after = hash_held_parts(trainer)

    assert before.keys() == after.keys() == {weight, moment}
    assert before[weight] == after[weight]
    assert before[moment] != after[moment]
