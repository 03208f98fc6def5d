"""lm-eval's class for models of transformers, with as many progress bars as there are tasks."""

from typing import Any

from lm_eval.models.huggingface import HFLM


class QuietHFLM(HFLM):  # type: ignore[misc] # lm-eval ships no types
    """Shows no bar for each batch of texts, as the class does where it scores whole texts."""

    def loglikelihood_rolling(self, requests: list[Any], *_: object, **__: object) -> list[float]:
        """Called by lm-eval with all requests of a task."""
        answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return answers
