"""Progress of lm-eval's transformers model class, counted in texts."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

from assay.progress import subtask


class BarAsTask:
    """A replacement for tqdm that shows each bar as a subtask of the open task."""

    def __init__(
        self,
        items: Collection[Any] = (),
        *,
        total: int | None = None,
        desc: str | None = None,
        **_: object,
    ) -> None:
        self._items, self._stack = items, ExitStack()
        task = subtask((desc or "prepares texts").lower(), total or len(items), "texts")
        self.update = self._stack.enter_context(task).advance
        self.close = self._stack.close

    def __iter__(self) -> Iterator[Any]:
        with self._stack:
            for item in self._items:
                yield item
                self.update()
