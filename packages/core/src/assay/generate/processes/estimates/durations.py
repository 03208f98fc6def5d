"""The time of the phases of a check, estimated from the model's sizes and a probe of the device."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.estimates.speed import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    SECONDS_TO_LOAD,
    Speed,
)
from assay.generate.passes.generation_loop import count_tokens
from assay.inputs import Batch

# Multiples of one call without values.
_CALL = 0.5
_RECORDED_CALL = 2.0
_REPLAYED_CALL = 1.6

# Decode steps of the trial.
_TRIAL_STEPS = 7


@dataclass(frozen=True, slots=True)
class Durations:
    """The sizes of a generation check, and the time of its phases."""

    call: float
    """Seconds of one call of the model without values, which is the time of its Python."""
    num_weights: int
    num_values: float
    """Numbers at all module boundaries for each token."""
    stored_bytes: int
    """Bytes of the golden."""
    batches: Sequence[Batch]
    reads_texts: bool
    """True if the reference reads generated texts in one call."""

    def of_reference(self, wide: Speed, narrow: Speed) -> list[float]:
        """Return the seconds of each phase of a capture with modules.

        wide, narrow: of the yardstick and of the noise run.
        """
        load = SECONDS_TO_LOAD + self.num_weights * SECONDS_PER_LOADED_WEIGHT
        stored = self.stored_bytes * SECONDS_PER_STORED_BYTE
        forced = self._texts(narrow) if self.reads_texts else self._steps(narrow, _CALL)
        return [
            load,
            _TRIAL_STEPS * _REPLAYED_CALL * self.call,
            self._steps(wide, _CALL),
            0.0,
            stored + (self._texts(wide) if self.reads_texts else self._steps(wide, _RECORDED_CALL)),
            load / 2,
            load / 2,
            forced,
            self._texts(narrow) / len(self.batches),
            self._texts(narrow) / self._num_rows,
            self._compared()
            + (self._texts(narrow) if self.reads_texts else self._steps(narrow, _REPLAYED_CALL)),
        ]

    def of_candidate(self, speed: Speed) -> list[float]:
        """Return the seconds of each phase of a candidate whose modules are measured."""
        load = SECONDS_TO_LOAD + self.num_weights * SECONDS_PER_LOADED_WEIGHT / 2
        return [
            load,
            load / 2,
            load / 2,
            self._steps(speed, _CALL),
            self._texts(speed),
            0.0,
            self._texts(speed) / len(self.batches),
            self._texts(speed) / self._num_rows,
            self._compared() + self._steps(speed, _REPLAYED_CALL),
        ]

    @property
    def _num_steps(self) -> int:
        return sum(max(0, batch.max_new_tokens - 1) for batch in self.batches)

    @property
    def _num_rows(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)

    def _texts(self, speed: Speed) -> float:
        """Return the seconds of one call for each batch, with all of its tokens."""
        products = count_tokens(self.batches) * self.num_weights * speed.product
        return products + len(self.batches) * _RECORDED_CALL * self.call

    def _steps(self, speed: Speed, calls: float) -> float:
        """Return the seconds of all prompts and decode steps; `calls`: the cost of a step's Python."""
        num_prompt_tokens = sum(len(one.rows) * one.length for one in self.batches)
        of_step = calls * self.call + self.num_weights * speed.weight
        return num_prompt_tokens * self.num_weights * speed.product + self._num_steps * of_step

    def _compared(self) -> float:
        return count_tokens(self.batches) * self.num_values * SECONDS_PER_COMPARED_VALUE
