"""Other things than a file, where a file is expected."""

import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

_SPARSE_BYTES = 5 << 29
# Hashing it takes seconds.
_SHARE_OF_SPARSE = 0.03


def replace_by_node(file: Path, rng: random.Random) -> str:
    """Put something else at the place of `file`. Returns: what it is."""
    node = _sparse_file if rng.random() < _SHARE_OF_SPARSE else rng.choice(_NODES)
    node(file)
    return f"{node.__name__.strip('_')} in place of the file"


def _nothing(file: Path) -> None:
    file.unlink()


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _socket(file: Path) -> None:
    file.unlink()
    here = Path.cwd()
    os.chdir(file.parent)  # the path of a socket is limited to 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    finally:
        os.chdir(here)


def _link_to_zero(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _link_to_null(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/null")


def _link_to_memory(file: Path) -> None:
    file.unlink()
    file.symlink_to("/proc/self/mem")


def _link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("absent")


def _link_outside(file: Path) -> None:
    outside = file.parent.parent / "outside"
    shutil.move(file, outside)
    file.symlink_to(outside)


def _sparse_file(file: Path) -> None:
    os.truncate(file, _SPARSE_BYTES)


_NODES: tuple[Callable[[Path], None], ...] = (
    _nothing, _folder, _fifo, _socket, _link_to_zero, _link_to_null, _link_to_memory, _link_to_itself,
    _dangling_link, _link_outside,
)  # fmt: skip
