"""A small Llama, its recorded yardstick, and replays of changed copies."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.row_positions import BatchPositions
from assay.hooks.suspension import ExactDouble
from assay.hooks.tensors import Boundary
from assay.judge.limits import load_limits
from assay.judge.replays import Judged, judge_replay
from assay.judge.results import ReplayResults
from assay.models.transformers_calls import quiet_transformers
from assay.recording.modules import Recorder
from assay.replay.modules import Replayer
from assay.trace import Trace, TraceWriter

Plant = Callable[[Any], object]
Run = Callable[[nn.Module], None]


def cast_weights(model: nn.Module, dtype: torch.dtype) -> Any:
    """As a loader does it: buffers such as inv_freq stay as they were computed."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def widen(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The yardstick: values of `dtype`, computed in float64."""
    widened: nn.Module = cast_weights(model, dtype).double()
    return widened


@dataclass
class Rig:
    """Records `model` by `run` and replays copies of it."""

    folder: Path
    model: nn.Module
    run: Run
    dtype: torch.dtype = torch.bfloat16
    timeline: BatchPositions | None = None
    _trace: Trace | None = None
    _noise: ReplayResults | None = field(default=None)

    @property
    def boundary(self) -> Boundary:
        return Boundary.exact_inputs_for(self.dtype)

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            with TraceWriter(self.folder, {}) as writer:
                tracer = ModuleTracer(Recorder(writer, self.boundary))
                self._go(widen(self.model, self.dtype), tracer, exact=True)
            self._trace = Trace.open(self.folder)
        return self._trace

    def replay(
        self,
        plant: Plant = lambda _model: None,
        attention: str = "eager",
        unmeasured: frozenset[tuple[str, str]] = frozenset(),
    ) -> ReplayResults:
        """Measure a copy in `dtype` that `plant` has changed, or replaced."""
        model = cast_weights(self.model, self.dtype)
        changed = plant(model)
        if isinstance(changed, nn.Module):
            model = changed
        replayer = Replayer(self.trace, self.boundary, attention, unmeasured=unmeasured)
        self._go(model, ModuleTracer(replayer), exact=False)
        return replayer.finish()

    def replay_yardstick(self) -> ReplayResults:
        replayer = Replayer(self.trace, self.boundary)
        self._go(widen(self.model, self.dtype), ModuleTracer(replayer), exact=True)
        return replayer.finish()

    def judge(self, plant: Plant = lambda _model: None, attention: str = "eager") -> list[Judged]:
        if self._noise is None:
            self._noise = self.replay()
        return judge_replay(self.replay(plant, attention), self._noise, load_limits())[0]

    def failed(self, plant: Plant, attention: str = "eager") -> set[str]:
        """Stages over a limit, with the phase where it is not the forward pass."""
        names = set()
        for item in self.judge(plant, attention):
            if item.failed:
                stage = item.port.stage
                phase = "" if stage.phase == "forward" else f" ({stage.phase})"
                names.add(f"{stage}{phase}")
        return names

    def _go(self, model: nn.Module, tracer: ModuleTracer, *, exact: bool) -> None:
        tracer.begin_batch(0, self.timeline)
        with tracer.attached(model), torch.no_grad(), ExactDouble() if exact else nullcontext():
            self.run(model)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with quiet_transformers():
        model: nn.Module = LlamaForCausalLM(config).eval()
    return model


# Prompt 0 has 20 tokens and 12 of padding, prompt 1 has 32.
IDS = torch.randint(0, 64, (2, 35), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 35, dtype=torch.long)
MASK[0, :12] = 0
PREFILL = 32


def generate(model: Any) -> None:
    """A prefill and three decode steps with a cache, as a generation loop makes them.

    A plant may set `model.new_cache` to a function that returns another cache.
    """
    new_cache = getattr(model, "new_cache", lambda: DynamicCache(config=model.config))
    cache = new_cache()
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    for start, end in ((0, PREFILL), *((at, at + 1) for at in range(PREFILL, 35))):
        model(
            input_ids=IDS[:, start:end],
            attention_mask=MASK[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> MakeRig:
    def make(model: nn.Module, run: Run, **settings: Any) -> Rig:
        return Rig(tmp_path / "yardstick", model, run, **settings)

    return make


@pytest.fixture(scope="session")
def llama_rig(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Shared: only its replays differ from test to test."""
    timeline = BatchPositions.of_batch((0, 1), MASK[:, :PREFILL], 3)
    return Rig(tmp_path_factory.mktemp("llama") / "yardstick", llama, generate, timeline=timeline)


@pytest.fixture
def tensor() -> Callable[..., Tensor]:
    """Seeded random values."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return make
