"""A micro model with random weights and a small batch, shared by the tests of this room."""

from collections.abc import Callable, Iterator

import pytest
import torch

from assay.devices.registry import open_device
from assay.generate.passes import Side
from assay.inputs import Batch
from assay.models import LoadedModel, load_model

LoadModel = Callable[..., LoadedModel]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama() -> LoadedModel:
    return load_model("micro:llama?trained=0", dtype="float32", attention="eager")


@pytest.fixture(scope="session")
def bert() -> LoadedModel:
    return load_model("micro:bert?trained=0", dtype="float32", attention="eager")


@pytest.fixture
def side(llama: LoadedModel) -> Side:
    return Side(llama, open_device("cpu"))


@pytest.fixture
def batch() -> Batch:
    """Two prompts, the first of them padded, that generate three tokens."""
    return Batch(7, ((65, 66), (67, 68, 69, 70)), (0, 1), 259, 3)
