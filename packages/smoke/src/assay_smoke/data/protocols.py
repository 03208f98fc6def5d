"""What users give to `assay smoke data`, each as FILE.py:NAME: one small protocol for each option.

The file is imported in a process of its own. A class whose constructor has the parameters of a
protocol fits as well as a function. Arguments are given by position: their names are free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

# The label of a token that counts for no loss. Source: torch.nn.functional.cross_entropy.
IGNORED = -100


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class RenderedChat(TypedDict):
    """A chat as it is trained on: a label is the id at its own position, or -100."""

    input_ids: Sequence[int]
    labels: Sequence[int]


class Feature(TypedDict, total=False):
    """One sample as a collator gets it: lists of equal length, not yet padded.

    labels: absent with `--features plain`, where every token is a label.
    """

    input_ids: list[int]
    attention_mask: list[int]
    labels: list[int]


class Render(Protocol):
    """`--render`: from messages to ids and labels."""

    def __call__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: Sequence[Message],
        max_length: int | None,
        /,
    ) -> RenderedChat | None:
        """Called for each chat; `max_length` is the most ids wanted, None for all of them.

        Returns: ids and labels, or None where a chat that is too long is dropped.
        """


class Collate(Protocol):
    """A collator: from samples to one batch."""

    def __call__(self, features: list[Feature], /) -> "Mapping[str, Tensor]":
        """Called for each batch.

        Returns: `input_ids`, `labels` and, where there is padding, `attention_mask`, each (B, T) in
            int64; labels stand at the position of their own token, as in transformers.
        """


class MakeCollator(Protocol):
    """`--collator` and `--packing`: called once for each tokenizer."""

    def __call__(self, tokenizer: "PreTrainedTokenizerBase", /) -> Collate:
        """Returns: the collator for `tokenizer`, which may pad on either side."""


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """A training run's order of samples, as one rank has to make it.

    num_samples: of the data set; a sample is known by its number, from 0.
    num_workers: of a data loader, if there is one; 0 is none.
    batch_size: samples of a batch on one rank; for `--batch-sampler` only a bound.
    lengths, tokens_per_batch: for `--batch-sampler`: the tokens of each sample, and how many those
        of a batch may have together.
    drop_last: leave out what does not fill a batch on every rank, rather than repeat samples.
    seed: also set in torch, numpy and random before the run begins.
    """

    num_samples: int
    batch_size: int = 1
    rank: int = 0
    num_ranks: int = 1
    num_workers: int = 0
    num_epochs: int = 3
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    lengths: tuple[int, ...] = ()
    tokens_per_batch: int = 0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run was interrupted: after `num_batches` batches of `epoch`, both from 0.

    state: what `state_dict()` of the interrupted run returned then; None if it has no such method.
    """

    epoch: int
    num_batches: int
    state: object = None


class OpenRun(Protocol):
    """`--sampler` and `--batch-sampler`: the data loop of one rank's training run."""

    def __call__(
        self, plan: LoaderPlan, resumed: ResumePoint | None, /
    ) -> Iterable[Iterable[Sequence[int]]]:
        """Called once for each rank.

        Returns: an iterable of epochs, beginning with the resumed one, which lacks the batches that
            were already seen; an epoch is an iterable of batches, a batch a sequence of sample numbers.
            If it is a `Stateful`, its state is taken where it is interrupted.
        """


@runtime_checkable
class Stateful(Protocol):
    """What keeps a state for its resume."""

    def state_dict(self) -> object:
        """The state from which the run goes on after the last batch that was drawn from it."""


class BackwardStep(Protocol):
    """`--accumulation`: the forward and backward passes of one optimizer step on one rank."""

    def __call__(
        self,
        model: "nn.Module",
        micro_batches: Sequence[Mapping[str, "Tensor"]],
        num_step_tokens: int,
        num_ranks: int,
        /,
    ) -> None:
        """Leaves the gradients of this rank in the model's parameters.

        model: of transformers; micro_batches: this rank's, with `input_ids`, `attention_mask` and
            `labels`; num_step_tokens: the label tokens of the step, of all micro-batches and ranks;
            num_ranks: over which gradients are averaged afterwards, as DDP and FSDP do.
        """


class OpenLoader(Protocol):
    """`--loader`: your DataLoader, with your seeding of workers, around a data set of ours."""

    def __call__(
        self, dataset: Sequence[Sequence[int]], num_workers: int, rank: int, /
    ) -> Iterable[Iterable[object]]:
        """Called once for a run, after torch, numpy and random were seeded.

        Returns: what is iterated once for each epoch; a batch holds items of `dataset` as they are:
            use `collate_fn=list`.
        """


class MakeDataset(Protocol):
    """`--dataset`: your data set with its random augmentation or masking."""

    def __call__(self, samples: Sequence[Feature], /) -> Sequence[object]:
        """Called once for a run.

        samples: all alike, so that items of the data set differ by its random numbers alone.
        Returns: a map-style data set of as many items.
        """
