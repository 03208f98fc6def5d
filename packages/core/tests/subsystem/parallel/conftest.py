from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from assay.devices.base import Device
from assay.testing.worlds import preload_for_ranks
from packages.core.tests.subsystem.parallel.pipeline_parallel.pipeline_runs import Case
from packages.core.tests.subsystem.parallel.tiny_models import build_model
from packages.core.tests.subsystem.parallel.training_runs import Oracle, train_whole
from packages.core.tests.subsystem.parallel.training_steps import (
    Record,
    load_whole,
    train_alone,
    train_alone_in_bfloat16,
    write_model,
)

preload_for_ranks(
    "peft",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.granite.modeling_granite",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.qwen3.modeling_qwen3",
)


@pytest.fixture
def oracle(architecture: str, device: Device) -> Oracle:
    """The training of the test's architecture on one process, once for all tests and ranks."""
    return _oracle(architecture, device.torch_device)


@lru_cache
def _oracle(architecture: str, device: str) -> Oracle:
    return train_whole(partial(build_model, architecture), device)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each architecture, written once, in several files of weights."""

    @lru_cache
    def write(architecture: str) -> Path:
        return write_model(architecture, tmp_path_factory.mktemp("models") / architecture)

    return write


@pytest.fixture
def folder(request: pytest.FixtureRequest, folders: Callable[[str], Path]) -> Path:
    return folders(getattr(request, "param", "llama"))


@pytest.fixture(scope="session")
def cases(folders: Callable[[str], Path]) -> Callable[[str], Case]:
    @lru_cache
    def make(architecture: str) -> Case:
        folder = folders(architecture)
        return Case(architecture, folder, train_alone(load_whole(folder)))

    return make


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(getattr(request, "param", "llama"))


@pytest.fixture(scope="session")
def expected_of_four_rows(folders: Callable[[str], Path]) -> Record:
    return train_alone(load_whole(folders("granite-untied")), rows=4)


@pytest.fixture(scope="session")
def expected_in_bfloat16(folders: Callable[[str], Path]) -> Record:
    return train_alone_in_bfloat16(folders("llama"))


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
