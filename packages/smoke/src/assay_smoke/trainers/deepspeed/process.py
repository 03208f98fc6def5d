"""Sets DeepSpeed up in this process and removes it without a trace."""

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
    """Make DeepSpeed usable on `torch_device` within the block.

    A single process gets a process group of one rank, which DeepSpeed requires.
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
        # Its compilation takes a minute, and only inference on the host calls it.
        stack.enter_context(mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None))
        if kind == "cpu":
            # Without AVX-512, float16 is slow but correct.
            from deepspeed.accelerator import get_accelerator

            accelerator: Any = get_accelerator()
            is_supported = mock.patch.object(accelerator, "is_fp16_supported", return_value=True)
            stack.enter_context(is_supported)
        yield


def _import_quietly() -> None:
    """Import DeepSpeed. Its warnings go to standard error, and its other messages are dropped."""
    import deepspeed

    del deepspeed
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # not that of a test runner
            handler.setStream(sys.stderr)


def _forget_groups() -> None:
    """Make DeepSpeed forget the process group that it found first."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None  # noqa: SLF001
