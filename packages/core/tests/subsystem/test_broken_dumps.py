"""Broken and incomplete dumps: each is one clear error, or not compared."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from packages.core.tests.dump_writers.msprobe import MsprobeWriter
from packages.core.tests.subsystem.commands import error_of, run_in_process
from packages.core.tests.unit.comparison.small_dumps import WIDTH, write

LAST = "step0/proc1/dump_tensor_data/Module.lm_head.Linear.forward.2.output.0.pt"


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile",)


def truncate(dump: Path) -> None:
    data = (dump / LAST).read_bytes()
    (dump / LAST).write_bytes(data[: len(data) // 2])


def hide_code(dump: Path) -> None:
    torch.save(Hostile(), dump / LAST)


def lose_file(dump: Path) -> None:
    (dump / LAST).unlink()


def link_out(dump: Path) -> None:
    (dump / LAST).rename(dump.parent / "elsewhere.pt")
    (dump / LAST).symlink_to(dump.parent / "elsewhere.pt")


def reuse_buffers(dump: Path) -> None:
    for file in dump.rglob("*.forward.1.output.*.pt"):
        shutil.copy(file, file.with_name(file.name.replace("forward.1", "forward.2")))


def edit_index(dump: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    (file,) = dump.rglob("dump.json")
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"data": change(index["data"])}))


def lose_step(dump: Path) -> None:
    edit_index(dump, lambda data: {key: call for key, call in data.items() if key[-1] != "2"})


def cut_off(dump: Path) -> None:
    edit_index(dump, lambda data: dict(list(data.items())[:28]))


def double_call(dump: Path) -> None:
    def change(data: dict[str, object]) -> dict[str, object]:
        (last,) = (call for key, call in data.items() if key == "Module.lm_head.Linear.forward.2")
        return data | {"Module.lm_head.Linear.forward.3": last}

    edit_index(dump, change)


def warm_up(dump: Path) -> None:
    shutil.rmtree(dump)
    write(dump, ids=torch.zeros(1, 8, dtype=torch.long))
    edit_index(dump, lambda data: {key: call for key, call in data.items() if key[-1] == "0"})


def claim_much(dump: Path) -> None:
    """Write a table of safetensors that claims 10 GB, in a file of 1 kB."""
    length = 10_000_000_000
    claim = {"norm.output": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}
    _write_safetensors(dump, json.dumps(claim).encode())


def claim_header(dump: Path) -> None:
    """Write a file of safetensors whose header has 2**60 bytes, by its own account."""
    _write_safetensors(dump, b"{}", 1 << 60)


def _write_safetensors(dump: Path, header: bytes, claimed: int | None = None) -> None:
    shutil.rmtree(dump)
    dump.mkdir()
    size = struct.pack("<Q", len(header) if claimed is None else claimed)
    (dump / "values.safetensors").write_bytes((size + header).ljust(1024, b"\0"))


def write_ranks(folder: Path, *ranks: int) -> None:
    """Write the shards that the given ones of two ranks hold."""
    whole = torch.linspace(-1, 1, 4 * WIDTH).reshape(1, 4, WIDTH)
    for rank in ranks:
        part = whole.narrow(-1, rank * WIDTH // 2, WIDTH // 2).clone()
        _write_rank(folder, rank, part)


def _write_rank(folder: Path, rank: int, part: torch.Tensor) -> None:
    writer = MsprobeWriter(folder, process=f"rank{rank}")
    for name in ("layers.0", "layers.1", "layers.2"):
        writer.add_call(name, "Block", (part,), {}, part)
    writer.close()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (truncate, "Module.lm_head.Linear.forward.2.output.0.pt"),
        (lose_file, "Module.lm_head.Linear.forward.2.output.0.pt is missing"),
        (hide_code, "objects other than tensors, which assay does not unpickle"),
        (lose_step, "tokens of step 2 (rows x tokens: 1 x 1)"),
        (cut_off, "the run was cut off in step 2: its last results are those of layers.1"),
        (double_call, "ACTUAL holds the same values twice in a pass: lm_head:output"),
        (warm_up, "ACTUAL holds only a warm-up: all of its tokens are equal"),
    ],
)
def test_broken_dump_is_not_compared(
    tmp_path: Path, break_it: Callable[[Path], None], message: str
) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    break_it(mine)
    run = run_in_process(tmp_path / "out", "compare", golden, mine)
    assert run.code == 3, run.stderr
    assert message in " ".join(run.stdout.split())
    assert not Path("hostile").exists()


def test_buffers_reused_on_both_sides_are_not_compared(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    for dump in (golden, mine):
        reuse_buffers(dump)
    run = run_in_process(tmp_path / "out", "compare", golden, mine)
    assert run.code == 3
    assert "the same values in steps 1, 2, though their tokens differ" in " ".join(
        run.stdout.split()
    )


def test_missing_rank_is_not_compared(tmp_path: Path) -> None:
    write_ranks(tmp_path / "golden", 0, 1)
    write_ranks(tmp_path / "mine", 0)
    run = run_in_process(tmp_path / "out", "compare", tmp_path / "golden", tmp_path / "mine")
    assert run.code == 3
    assert f"{tmp_path / 'mine'} lacks rank 1" in " ".join(run.stdout.split())


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (link_out, "outside of the dump"),
        (claim_much, "values.safetensors"),
        (claim_header, "values.safetensors"),
    ],
)
def test_hostile_dump_is_one_error(
    tmp_path: Path, break_it: Callable[[Path], None], message: str
) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    if break_it is not link_out:
        shutil.rmtree(golden)
        golden.mkdir()
        save_file({"norm.output": torch.ones(1)}, golden / "values.safetensors")
    break_it(mine)
    text = error_of(run_in_process(tmp_path / "out", "compare", golden, mine))
    assert message in text
    assert len(text.splitlines()) == 1
