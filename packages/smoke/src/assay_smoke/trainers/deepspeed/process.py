"""DeepSpeed in this process: imported, joined to a process group, and gone without a trace."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from assay.errors import UsageError

_INSTALL = "the trainer deepspeed needs DeepSpeed: pip install 'assay-smoke[deepspeed]'"


def require_deepspeed() -> None:
    """Raise UsageError if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise UsageError(_INSTALL)


@contextmanager
def deepspeed_process(torch_device: str) -> Iterator[None]:
    """Inside, DeepSpeed can be used on `torch_device`.

    In a single process a process group of one rank is made, which DeepSpeed cannot do without.
    """
    with ExitStack() as stack:
        kind = torch.device(torch_device).type
        variables = {"DS_ACCELERATOR": kind, "LOCAL_RANK": "0"}
        stack.enter_context(mock.patch.dict(os.environ, variables | os.environ))
        _import_quietly()
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if kind == "cpu" else None,
                store=dist.HashStore(),  # type: ignore[attr-defined]  # of torch
                rank=0,
                world_size=1,
            )
            stack.callback(dist.destroy_process_group)
        stack.callback(_forget_groups)
        # Compiled for inference on the host, which takes a minute: training never calls it.
        stack.enter_context(mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None))
        if kind == "cpu":
            stack.enter_context(_float16_on_host())
        yield


def _import_quietly() -> None:
    """Import DeepSpeed, whose messages are for its own users: here warnings are left, on stderr."""
    import deepspeed

    del deepspeed
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own, and none of a test runner
            handler.setStream(sys.stderr)


def _forget_groups() -> None:
    """Have DeepSpeed look for the process group anew: it keeps the one that it found first."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None  # noqa: SLF001


@contextmanager
def _float16_on_host() -> Iterator[None]:
    """Inside, DeepSpeed takes float16 on the host, where it is slow without AVX-512 and not wrong."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    with mock.patch.object(accelerator, "is_fp16_supported", return_value=True):
        yield
