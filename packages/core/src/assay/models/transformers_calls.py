"""Quiet transformers, with its progress as ours, and save its models on any rank."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from assay.progress import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Limit transformers to error logs inside this context, and show its bars as our tasks."""
    from transformers.utils import logging as untyped_logging

    logging: Any = untyped_logging
    verbosity = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Releases without the hook show no count.
    set_hook = getattr(logging, "set_tqdm_hook", lambda _hook: None)
    hook = set_hook(_count)
    try:
        yield
    finally:
        set_hook(hook)
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _count(
    make_bar: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:  # noqa: ANN401 - a substitute for a tqdm bar
    items = next(iter(arguments), None)
    if isinstance(items, Collection):
        return counted(str(options.get("desc", "loads")).lower(), items, "tensors")
    return make_bar(*arguments, **options)


def save_pretrained(
    model: Any,  # noqa: ANN401 - transformers
    folder: Path,
    state: "Mapping[str, Tensor] | None" = None,
) -> None:
    """Write `model` into `folder` on every rank that calls this.

    state: weights to write instead of the model's own.
    """
    from transformers import modeling_utils

    with (
        quiet_transformers(),
        # transformers writes only on rank 0; the folder of another rank would stay empty.
        mock.patch.object(model, "should_save_on_this_rank", return_value=True, create=True),
        # The original imports DeepSpeed to look for a wrapper, which lacks `save_pretrained`.
        mock.patch.object(modeling_utils, "unwrap_model", lambda unwrapped: unwrapped),
    ):
        model.save_pretrained(folder, state_dict=state)
