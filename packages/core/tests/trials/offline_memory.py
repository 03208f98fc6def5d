"""What comparisons with one golden have in common, measured once."""

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from assay.comparison import check, measured_dumps, replaying
from assay.comparison.check import CompareOptions
from assay.comparison.judging.verdict import judge_dumps as judge
from assay.comparison.measured_dumps import MeasuredDumps
from assay.comparison.measuring.pair_measurer import MeasuredPorts
from assay.comparison.pairing.passes import Pass
from assay.comparison.replaying import Reference, TrustedModel
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump

_MOST_REFERENCES = 4


@dataclass
class Memory:
    """Results that later comparisons take from here instead of computing them again.

    dumps: those of the last comparison.
    """

    dumps: MeasuredDumps | None = None
    _noise: dict[Hashable, MeasuredPorts] = field(default_factory=dict)
    _references: OrderedDict[Hashable, tuple[Reference, Path]] = field(default_factory=OrderedDict)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let comparisons use it, and keep what they measured."""
        measure = measured_dumps.measure_noise
        record = replaying.record_reference

        def judge_dumps(dumps: MeasuredDumps) -> Any:
            self.dumps = dumps
            return judge(dumps)

        def measure_noise(comparison: CompareOptions, *rest: Any) -> MeasuredPorts:
            key = comparison.expected, comparison.noise
            if key not in self._noise:
                self._noise = {key: measure(comparison, *rest)}
            return self._noise[key]

        def record_reference(
            trusted: TrustedModel, passes: Sequence[Pass], dtype: str, folder: Path
        ) -> Reference:
            del folder
            key = trusted.model, dtype, *map(_key_of, passes)
            if key not in self._references:
                own = Path(tempfile.mkdtemp(prefix="reference-"))
                self._references[key] = record(trusted, passes, dtype, own / "trace"), own
            self._references.move_to_end(key)
            self._forget()
            return self._references[key][0]

        with ExitStack() as patches:
            for module, function in (
                (check, judge_dumps),
                (measured_dumps, measure_noise),
                (replaying, record_reference),
            ):
                patches.enter_context(patch.object(module, function.__name__, function))
            yield

    def _forget(self) -> None:
        while len(self._references) > _MOST_REFERENCES:
            _, (_, folder) = self._references.popitem(last=False)
            shutil.rmtree(folder)


def _key_of(one: Pass) -> Hashable:
    ids = None if one.ids is None else tuple(map(tuple, one.ids.tolist()))
    return one.batch, one.step, ids, str(one.rows)


@lru_cache(maxsize=2)
def open_shared(path: str) -> Dump:
    """Open a dump that many comparisons read."""
    return read_once(open_dump(path))


def read_once(dump: Dump) -> Dump:
    """Keep the tensors of a dump in memory after the first reading."""

    def keep(load: Callable[[], Tensor]) -> Callable[[], Tensor]:
        read = cache(load)
        return lambda: read().clone()  # a model may write to what it is given

    tensors = [replace(one, load=keep(one.load)) if one.load else one for one in dump.tensors]
    return replace(dump, tensors=tensors)
