import os
from contextlib import closing
from pathlib import Path

import pytest

from assay.launch import calling
from assay.launch.process_groups import LinePipe


def test_log_that_is_too_large_loses_its_middle_while_a_rank_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "LARGEST_LOG_BYTES", 40)
    log = tmp_path / "rank0.log"
    with log.open("ab", buffering=0) as rank:
        rank.write(b"a" * 30 + b"b" * 10)
        calling.shorten_log(log)
        assert log.read_bytes() == b"a" * 30 + b"b" * 10

        rank.write(b"c" * 8)
        calling.shorten_log(log)
        rank.write(b"d")

    cut = b"\n[assay: output is cut here]\n"
    assert log.read_bytes() == b"a" * 20 + cut + b"bb" + b"c" * 8 + b"d"


def test_log_that_does_not_exist_yet_is_not_made(tmp_path: Path) -> None:
    calling.shorten_log(tmp_path / "rank0.log")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("half", [b'{"rank": 0, "ev', b"[1]", b"text"])
def test_line_that_an_interrupted_process_left_unfinished_is_ignored(half: bytes) -> None:
    with closing(LinePipe()) as pipe:
        os.write(pipe.writer, half + b'\n{"rank": 0}\n')
        assert pipe.read_lines() == [{"rank": 0}]
