"""Reading of untrusted tensor files: accepted tensors, and refusals before memory is allocated."""

import resource
from pathlib import Path

import pytest
import torch

from assay.dumps.reading import path_inside, require_dense, require_inside, require_values
from assay.files import UnreadableFileError
from assay.models.stored_tensors import load_objects

FILE = Path("a.pt")


def test_small_expanded_tensor_is_read(tmp_path: Path) -> None:
    torch.save(torch.tensor([[1.0], [2.0]]).expand(2, 3), tmp_path / "a.pt")
    value = require_values(tmp_path / "a.pt", "x", load_objects(tmp_path / "a.pt"))
    assert value.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]


def test_expanded_tensor_of_10_gb_is_refused_without_memory(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(2_500_000_000), tmp_path / "a.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    value = load_objects(tmp_path / "a.pt")
    assert require_dense(FILE, "x", value).shape == (2_500_000_000,)
    with pytest.raises(UnreadableFileError, match="x has more elements than are stored"):
        require_values(FILE, "x", value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_number_of_bytes_beyond_64_bits_is_refused() -> None:
    with pytest.raises(UnreadableFileError, match="x has more elements than are stored"):
        require_values(FILE, "x", torch.zeros(1).expand(2**62))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1.0], "x is a list, not a tensor"),
        (torch.empty(2, device="meta"), "x is not a dense tensor: torch.strided on meta"),
        (torch.eye(2).to_sparse(), "x is not a dense tensor: torch.sparse_coo on cpu"),
    ],
    ids=["list", "meta", "sparse"],
)
def test_anything_but_a_dense_tensor_is_refused(value: object, problem: str) -> None:
    with pytest.raises(UnreadableFileError) as caught:
        require_dense(FILE, "x", value)
    assert str(caught.value) == f"a.pt: {problem}"


def test_parameter_has_no_gradient_history() -> None:
    assert not require_values(FILE, "x", torch.nn.Parameter(torch.zeros(2))).requires_grad


def test_file_name_in_latin_1_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="its name is not UTF-8"):
        path_inside(tmp_path, b"caf\xe9.pt".decode("utf-8", "surrogateescape"))


def test_linked_dump_is_inside_of_itself_but_not_of_the_folder_around_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "step").mkdir(parents=True)
    (tmp_path / "dumps").mkdir()
    link = tmp_path / "dumps" / "mine"
    link.symlink_to(tmp_path / "elsewhere")
    require_inside(link, link.resolve() / "step")
    require_inside(link / "step", link.resolve())
    with pytest.raises(UnreadableFileError, match="it lies outside of the dump"):
        require_inside(tmp_path / "dumps", link)


@pytest.mark.parametrize("name", ["..", "step/..", "step/../..", "../mine", "link", "link/a.pt"])
def test_names_that_leave_the_dump_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine" / "step").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "other")
    if name in ("step/..", "../mine"):
        path_inside(tmp_path / "mine", name)
        return
    with pytest.raises(UnreadableFileError, match="it lies outside of the dump"):
        path_inside(tmp_path / "mine", name)
