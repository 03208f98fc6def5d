"""Replace the progress bars and load reports of transformers."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from assay.progress import counted


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
