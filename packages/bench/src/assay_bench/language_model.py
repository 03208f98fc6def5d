"""A loaded model as lm-eval asks it: log-likelihoods of continuations.

Shapes: B requests, T tokens, V vocabulary.
"""

import math
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor

from assay.devices.base import Device
from assay.errors import UsageError
from assay.models import LoadedModel

_BATCH_SIZE = 32

Request = tuple[tuple[str, str], list[int], list[int]]
Answers = list[tuple[float, bool]]


class AssayLM(TemplateLM):  # type: ignore[misc] # lm-eval ships no types
    """`loaded` on `device`; `num_non_finite` counts answers that are no number."""

    def __init__(self, loaded: LoadedModel, device: Device) -> None:
        super().__init__()
        self._loaded, self._device = loaded, device
        self.num_non_finite = 0

    @property
    def eot_token_id(self) -> int:
        """What an empty context is replaced by."""
        ends = self._loaded.eos_token_ids
        return ends[0] if ends else self._loaded.pad_token_id

    def tok_encode(self, string: str, *_: object, **__: object) -> list[int]:
        """Ids of `string`, as the model is given them anywhere in assay."""
        return self._loaded.encode(string)

    def loglikelihood(self, requests: list[Any], *_: object, **__: object) -> Answers:
        """The base class without its progress bar; called by lm-eval with all requests of a task."""
        answers: Answers = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(self, *_: object, **__: object) -> list[float]:
        """Not there yet."""
        raise UsageError("tasks that score whole texts are not there yet")

    def generate_until(self, *_: object, **__: object) -> list[str]:
        """Not there yet."""
        raise UsageError("tasks that generate are not there yet")

    def _loglikelihood_tokens(self, requests: list[Request], **_: object) -> Answers:
        longest_first = sorted(
            range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])
        )
        answers: dict[int, tuple[float, bool]] = {}
        for start in range(0, len(requests), _BATCH_SIZE):
            numbers = longest_first[start : start + _BATCH_SIZE]
            batch = [(requests[number][1], requests[number][2]) for number in numbers]
            answers.update(zip(numbers, self._answer(batch), strict=True))
        return [answers[number] for number in range(len(requests))]

    @torch.no_grad()
    def _answer(self, batch: list[tuple[list[int], list[int]]]) -> Answers:
        # The last token is scored and is no input; what is too long loses its beginning.
        limit = self._loaded.max_positions or 0
        inputs = [(context + piece)[:-1][-limit:] for context, piece in batch]
        length = max(map(len, inputs))
        pad = self._loaded.pad_token_id
        device = self._device.torch_device
        ids_BT = torch.tensor([row + [pad] * (length - len(row)) for row in inputs], device=device)
        mask_BT = torch.tensor(
            [[1] * len(row) + [0] * (length - len(row)) for row in inputs], device=device
        )
        with self._device.execution():
            logits_BTV = self._loaded.model(input_ids=ids_BT, attention_mask=mask_BT).logits
        return [
            self._score(logits_TV[len(row) - len(piece) : len(row)], piece)
            for logits_TV, row, (_, piece) in zip(logits_BTV.cpu(), inputs, batch, strict=True)
        ]

    def _score(self, logits_TV: Tensor, piece: list[int]) -> tuple[float, bool]:
        target_T = torch.tensor(piece)
        values_TV = logits_TV.double().log_softmax(-1)
        total = float(values_TV.gather(-1, target_T[:, None]).sum())
        if math.isnan(total):
            self.num_non_finite += 1
        return total, bool((logits_TV.argmax(-1) == target_T).all())
