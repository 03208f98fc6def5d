import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packages.core.tests.perf.stopwatch import Times
from packages.core.tests.trials.tables import markdown_table

BATCH, LENGTH, VOCABULARY = 2, 128, 32_000


@dataclass
class Table:
    """What was measured, by what it has to be."""

    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)

    def at_most(self, what: str, measured: Times, bound: float, note: str = "") -> None:
        """Judge processor time: the clock also counts what other processes did meanwhile."""
        self._add(what, measured, f"<= {bound:g}", note)
        assert measured.cpu <= bound, what

    def at_least(self, what: str, ratio: Times, bound: float, note: str = "") -> None:
        """Judge the ratio of two rates by the clock: tools differ in how many cores they use."""
        self._add(what, ratio, f">= {bound:g}", note)
        assert ratio.wall >= bound, what

    def _add(self, what: str, measured: Times, bound: str, note: str) -> None:
        self.rows.append((what, bound, f"{measured.cpu:.2f}", f"{measured.wall:.2f}", note))


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    filled = Table()
    yield filled
    head = ("what", "bound", "processor time", "clock", "of what")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n\n{markdown_table(head, filled.rows)}\n\nload of the machine: {load}")  # noqa: T201


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other measure what else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama() -> LlamaForCausalLM:
    """8 layers, 58 M parameters, random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="session")
def model_folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def input_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


@pytest.fixture(scope="session")
def prompts(input_ids: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in input_ids.tolist()))
    return path


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[], Path]:
    """A new folder for each call."""
    numbers = iter(range(1_000_000))

    def make() -> Path:
        return tmp_path / f"{next(numbers)}"

    return make
