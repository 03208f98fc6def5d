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
from assay.estimates.trial_call import TrialCall
from assay.generate.passes.generation_loop import count_tokens
from assay.inputs import Batch

# Multiples of one call without values.
_CALL = 0.5
_RECORDED_CALL = 2.0
_REPLAYED_CALL = 1.6

# Share of texts that a candidate runs twice: its tokens differ at a near tie, so it runs again with the
# reference's.
_LEAVING = 0.5

# Calls of the trial in `whole_texts`: three generate, one reads the text, and three replay.
_TRIAL_CALLS = 7


@dataclass(frozen=True, slots=True)
class Durations:
    """The sizes of a generation check, and the time of its phases."""

    trial: TrialCall
    num_weights: int
    stored_bytes: int
    """Bytes of the golden."""
    batches: Sequence[Batch]
    reads_texts: bool
    """True if the reference reads generated texts in one call."""

    def of_reference(self, wide: Speed, narrow: Speed) -> list[float]:
        """Return the seconds of each phase of `capture_golden` with modules.

        wide, narrow: of the yardstick and of the noise run.
        """
        load = SECONDS_TO_LOAD + self.num_weights * SECONDS_PER_LOADED_WEIGHT
        stored = self.stored_bytes * SECONDS_PER_STORED_BYTE
        # Experts are chosen step by step, so the noise run is given the tokens step by step.
        in_texts = self.reads_texts and not self.trial.chooses_experts
        forced = self._texts(narrow) if in_texts else self._steps(narrow, _CALL)
        recorded = self._texts(wide) if self.reads_texts else self._steps(wide, _RECORDED_CALL)
        replayed = self._texts(narrow) if self.reads_texts else self._steps(narrow, _REPLAYED_CALL)
        of_trial = _REPLAYED_CALL * self.trial.seconds + self.trial.num_multiplied * wide.weight
        return [
            load,
            _TRIAL_CALLS * of_trial if self.reads_texts else 0.0,
            self._steps(wide, _CALL),
            0.0,  # scores
            stored + recorded,
            load / 2,
            load / 2,  # comparison with the files
            forced,
            *self._first_texts(narrow),
            self._compared() + replayed,
        ]

    def of_candidate(self, speed: Speed) -> list[float]:
        """Return the seconds of each phase of `run_candidate` at the level `modules`."""
        load = SECONDS_TO_LOAD + self.num_weights * SECONDS_PER_LOADED_WEIGHT / 2
        return [
            load,
            load / 2,  # comparison with the files
            load / 2,  # comparison with the reference's weights
            self._steps(speed, _CALL),
            _LEAVING * self._steps(speed, _CALL),
            0.0,  # scores
            *self._first_texts(speed),
            self._compared() + self._steps(speed, _REPLAYED_CALL),
        ]

    @property
    def _num_steps(self) -> int:
        return sum(max(0, batch.max_new_tokens - 1) for batch in self.batches)

    def _texts(self, speed: Speed) -> float:
        """Return the seconds of one call for each batch, with all of its tokens."""
        return sum(self._text(speed, count_tokens([batch])) for batch in self.batches)

    def _first_texts(self, speed: Speed) -> tuple[float, float]:
        """Return the seconds of the first batch, which runs again, and of one of its texts."""
        first = self.batches[0]
        num_tokens = count_tokens([first])
        return self._text(speed, num_tokens), self._text(speed, num_tokens // len(first.rows))

    def _text(self, speed: Speed, num_tokens: int) -> float:
        return (
            num_tokens * self.trial.num_multiplied * speed.product
            + _RECORDED_CALL * self.trial.seconds
        )

    def _steps(self, speed: Speed, calls: float) -> float:
        """Return the seconds of all prompts and decode steps; `calls`: the cost of a step's Python."""
        num_prompt_tokens = sum(len(one.rows) * one.length for one in self.batches)
        of_step = calls * self.trial.seconds + self.trial.num_multiplied * speed.weight
        return (
            num_prompt_tokens * self.trial.num_multiplied * speed.product
            + self._num_steps * of_step
        )

    def _compared(self) -> float:
        return count_tokens(self.batches) * self.trial.num_values * SECONDS_PER_COMPARED_VALUE
