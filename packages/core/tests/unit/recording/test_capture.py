from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.errors import UsageError
from assay.recording.capture import capture
from assay.recording.limits import Ranges
from assay.runs import SilentProgress
from assay.sites import CallSite
from assay.trace import Trace
from assay.verdicts import Outcome, Verdict


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def test_everything_that_runs_inside_is_recorded(tmp_path: Path) -> None:
    net = model()
    x = torch.ones(2, 3)
    with capture(net, tmp_path / "t"):
        expected = net(x)
        net(2 * x)

    trace = Trace.open(tmp_path / "t")
    assert trace.complete
    assert [call.site.module for call in trace.calls] == ["", "0", "1"] * 2
    call = trace.find(CallSite(0, ""))
    assert call is not None
    assert torch.equal(trace.tensor(call, "output"), expected)
    assert trace.manifest["model"] == "Sequential"


def test_statistics_take_the_place_of_tensors(tmp_path: Path) -> None:
    net = model()
    with capture(net, tmp_path / "t", stats_only=True):
        net(torch.ones(2, 3))

    ports = Trace.open(tmp_path / "t").calls[0].ports
    assert ports == ("input.input.statistics", "output.statistics")


def test_level_logits_records_the_model_and_none_of_its_modules(tmp_path: Path) -> None:
    net = model()
    with capture(net, tmp_path / "t", level="logits"):
        expected = net(torch.ones(2, 3))

    trace = Trace.open(tmp_path / "t")
    (call,) = trace.calls
    assert (call.site.module, call.ports) == ("", ("input.input", "output"))
    assert torch.equal(trace.tensor(call, "output"), expected)


def test_capture_does_not_change_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = model()
    x = torch.ones(2, 3)
    net(x).sum().backward()
    weight = net[0].weight
    assert isinstance(weight.grad, torch.Tensor)
    expected = weight.grad.clone()
    net.zero_grad()
    with capture(net, tmp_path / "t"):
        net(x).sum().backward()

    assert torch.equal(weight.grad, expected)


def test_calls_before_an_exception_are_kept(tmp_path: Path) -> None:
    net = model()

    def run_and_fail() -> None:
        with capture(net, tmp_path / "t"):
            net(torch.ones(2, 3))
            raise KeyError

    with pytest.raises(KeyError):
        run_and_fail()

    assert len(Trace.open(tmp_path / "t").calls) == 3


class Causal(nn.Module):
    """A minimal language model: ids in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 16)
        self.checkpoints = False

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            if self.checkpoints:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def generate(net: nn.Module) -> None:
    """Two generations of a prefill and two decode steps."""
    with torch.no_grad():
        for first in (1, 5):
            net(torch.arange(first, first + 3)[None])
            for token in (first + 3, first + 4):
                net(torch.tensor([[token]]))


def train(net: nn.Module) -> None:
    """Two optimizer steps of two micro-batches each, with clipped gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(2):
        for micro_batch in range(2):
            ids = torch.arange(5)[None] + first + micro_batch
            nn.functional.cross_entropy(net(ids)[0], ids[0]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"steps": "0,3:5"}, [0, 3, 4]),
        ({"steps": "4:"}, [4, 5]),
        ({"tokens": "0"}, [0, 3]),
        ({"tokens": "1:"}, [1, 2, 4, 5]),
        ({"tokens": "0:2", "steps": "2:"}, [3, 4]),
    ],
)
def test_steps_and_tokens_choose_passes(
    tmp_path: Path, options: dict[str, Any], passes: list[int]
) -> None:
    net = Causal()
    with capture(net, tmp_path / "t", **options):
        generate(net)

    steps = [call.site.step for call in Trace.open(tmp_path / "t").calls if not call.site.module]
    assert steps == passes


def test_globs_choose_modules(tmp_path: Path) -> None:
    net = Causal()
    with capture(net, tmp_path / "t", include=("layers.*", "head"), exclude=("layers.0",)):
        net(torch.arange(3)[None])

    assert [call.site.module for call in Trace.open(tmp_path / "t").calls] == ["layers.1", "head"]


@pytest.mark.parametrize("text", ["", "a", "3:2", "2:2", "-1", "1;2", "1:2:3", "9" * 5000])
def test_invalid_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Ranges.parse(text)


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no module .* matches include='layer\.\*'"):
        capture(Causal(), tmp_path / "t", include=("layer.*",)).start()


def test_one_model_has_one_capture_at_a_time(tmp_path: Path) -> None:
    net = Causal()
    with (
        capture(net, tmp_path / "a"),
        pytest.raises(UsageError, match="is being captured already"),
    ):
        capture(net, tmp_path / "b").start()
    with capture(net, tmp_path / "c"):
        pass


def test_start_and_stop_do_what_the_with_statement_does(tmp_path: Path) -> None:
    net = Causal()
    running = capture(net, tmp_path / "a").start()
    generate(net)
    running.stop()
    capture(net, tmp_path / "b")(generate)(net)
    generate(net)

    assert judged(tmp_path / "a", tmp_path / "b").verdict is Outcome.PASS
    assert len(Trace.open(tmp_path / "b").calls) == 6 * 5


def test_training_is_numbered_by_optimizer_steps(tmp_path: Path) -> None:
    net = Causal()
    with capture(net, tmp_path / "t", weights=True):
        train(net)

    trace = Trace.open(tmp_path / "t")
    roots = [call.site for call in trace.calls if not call.site.module]
    forward = [(at.step, at.micro_batch) for at in roots if at.phase == "forward"]
    backward = [(at.step, at.micro_batch) for at in roots if at.phase == "backward"]
    assert forward == backward == [(0, 0), (0, 1), (1, 0), (1, 1)]
    dump = open_dump(str(tmp_path / "t"))
    ports = {
        (one.site.at.step, one.site.at.phase)
        for one in dump.tensors
        if one.site.port == "parameter.weight"
    }
    assert ports == {
        (0, "forward"),
        (0, "backward"),
        (0, "clip"),
        (1, "forward"),
        (1, "backward"),
        (1, "clip"),
        (2, "forward"),
    }


def test_an_evaluation_after_training_is_not_an_unfinished_step(tmp_path: Path) -> None:
    for name in ("one", "two"):
        net = Causal()
        with capture(net, tmp_path / name):
            train(net)
            with torch.no_grad():
                net(torch.arange(5)[None])

    assert judged(tmp_path / "one", tmp_path / "two").verdict is Outcome.PASS


def test_gradients_are_recorded_before_and_after_clipping(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with capture(net, tmp_path / "t", weights=True):
        for x in ((3.0, 4.0), (0.3, 0.4)):
            net(torch.tensor([x])).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    dump = open_dump(str(tmp_path / "t"))
    gradients = {
        (one.site.at.step, one.site.at.phase): one.read().flatten().tolist()
        for one in dump.tensors
        if one.site.port == "parameter.weight" and one.site.at.phase != "forward"
    }
    assert gradients[0, "backward"] == [3.0, 4.0]
    assert gradients[0, "clip"] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert gradients[1, "backward"] == gradients[1, "clip"] == pytest.approx([0.3, 0.4])


def test_a_second_backward_pass_is_ignored(tmp_path: Path) -> None:
    net = Causal()
    with capture(net, tmp_path / "t"):
        loss = net(torch.arange(3)[None]).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    calls = Trace.open(tmp_path / "t").calls
    assert [call.site.phase for call in calls if not call.site.module] == ["forward", "backward"]


def test_faults_in_training_are_located_in_captures(tmp_path: Path) -> None:
    def scale_forward(net: Causal) -> None:
        net.layers[1].register_forward_hook(lambda _module, _args, output: output * 1.02)

    def scale_gradient(net: Causal) -> None:
        net.get_parameter("layers.1.weight").register_hook(lambda gradient: gradient * 1.1)

    def use_checkpoints(net: Causal) -> None:
        net.checkpoints = True

    for name, change in (
        ("clean", lambda _: None), ("forward", scale_forward), ("gradient", scale_gradient),
        ("checkpoints", use_checkpoints),
    ):  # fmt: skip
        net = Causal()
        change(net)
        with capture(net, tmp_path / name, weights=True):
            train(net)

    assert judged(tmp_path / "clean", tmp_path / "checkpoints").verdict is Outcome.PASS
    for name, phase in (("forward", "forward"), ("gradient", "backward")):
        location = judged(tmp_path / "clean", tmp_path / name).location
        assert location is not None
        assert (location.module, location.phase) == ("layers.1", phase)


def test_later_steps_are_compared_with_the_weights_of_their_own_step(tmp_path: Path) -> None:
    for name, steps in (("all", None), ("later", "1:")):
        net = Causal()
        with capture(net, tmp_path / name, weights=True, steps=steps):
            train(net)

    assert judged(tmp_path / "later", tmp_path / "all").verdict is Outcome.PASS
    assert "weights" in judged(tmp_path / "later", tmp_path / "all").levels


def test_two_captures_of_statistics_are_compared(tmp_path: Path) -> None:
    for name, scale in (("one", 1.0), ("two", 1.0), ("fault", 1.05)):
        net = Causal()
        net.head.register_forward_hook(lambda _m, _a, output, scale=scale: output * scale)
        with capture(net, tmp_path / name, stats_only=True):
            generate(net)

    def judge(actual: str) -> Verdict:
        sides = open_dump(str(tmp_path / "one")), open_dump(str(tmp_path / actual))
        return compare_dumps(CompareOptions("a", "b", stats=True), *sides, SilentProgress()).verdict

    assert judge("two").verdict is Outcome.PASS
    found = judge("fault")
    assert found.verdict is Outcome.FAIL
    assert found.location is not None
    assert found.location.module == "head"


def test_ranks_are_read_as_one_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, ranks in (("whole", (0, 1, 2)), ("partial", (0, 2))):
        for rank in ranks:
            monkeypatch.setattr("assay.recording.capture._find_rank", lambda rank=rank: (rank, 3))
            net = Causal()
            with capture(net, tmp_path / folder, weights=True):
                generate(net)

    dump = open_dump(str(tmp_path / "whole"))
    assert {one.site.at.rank for one in dump.tensors} == {0, 1, 2}
    assert not dump.problems
    assert list(open_dump(str(tmp_path / "partial")).problems) == ["rank 1 is missing"]
    assert judged(tmp_path / "whole", tmp_path / "whole").verdict is Outcome.PASS
    assert judged(tmp_path / "whole", tmp_path / "partial").verdict is Outcome.NOT_COMPARED


class Envoy:
    """A wrapper that is not a module, as that of nnsight."""

    def __init__(self, model: nn.Module) -> None:
        self._module = model


def test_a_wrapper_that_is_not_a_module_is_refused_without_a_folder(tmp_path: Path) -> None:
    wrapper: Any = Envoy(Causal())
    with pytest.raises(UsageError) as refused:
        capture(wrapper, tmp_path / "t")

    assert str(refused.value) == (
        "Envoy is not a torch.nn.Module: give one, such as its attribute _module"
    )
    assert not (tmp_path / "t").exists()
