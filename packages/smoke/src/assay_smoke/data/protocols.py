"""Protocols of the code that users give to `assay smoke data` as FILE.py:NAME, one per option.

The file is imported in its own process. A class whose constructor matches a protocol works like a
function. Arguments are positional, so their names are free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

# A tokenizer of transformers.
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

# The label of a token without a loss. Source: torch.nn.functional.cross_entropy.
IGNORED = -100


# `masked`: the first half of a sample has no labels, as in fine-tuning. `plain`: samples have no key
# `labels`, and every token counts.
FeatureKind = Literal["masked", "plain"]

# Declared treatment of a chat that is too long.
Truncation = Literal["keep-start", "keep-end", "drop"]


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class RenderedChat(TypedDict):
    """A chat as training sees it. A label is the id at its own position, or -100."""

    input_ids: Sequence[int]
    labels: Sequence[int]


class Feature(TypedDict, total=False):
    """A sample for a collator: unpadded lists of equal length.

    `labels` is absent with `--features plain`, where every token has a label.
    """

    input_ids: list[int]
    attention_mask: list[int]
    labels: list[int]


class Render(Protocol):
    """`--render`: converts messages to ids and labels."""

    def __call__(
        self, tokenizer: Tokenizer, messages: Sequence[Message], max_length: int | None, /
    ) -> RenderedChat | None:
        """Render one chat to at most `max_length` ids, or to all of them for None.

        Returns: ids and labels, or None if a chat that is too long is dropped.
        """


class Collate(Protocol):
    """A collator: converts samples to one batch."""

    def __call__(self, features: list[Feature], /) -> "Mapping[str, Tensor]":
        """Collate one batch.

        Returns: `input_ids`, `labels` and, with padding, `attention_mask`, each (B, T) in int64. Labels
            are at the position of their own token, as in transformers.
        """


class MakeCollator(Protocol):
    """`--collator` and `--packing`: makes a collator."""

    def __call__(self, tokenizer: Tokenizer, /) -> Collate:
        """Make the collator for `tokenizer`, which may pad on either side. Called once per tokenizer."""


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """The sample order that one rank of a training run has to make."""

    num_samples: int
    """Size of the dataset. Samples are numbered from 0."""
    batch_size: int = 1
    """Samples per batch on one rank; an upper bound for `--batch-sampler`."""
    rank: int = 0
    num_ranks: int = 1
    num_workers: int = 0
    """Workers of the data loader, if there is one."""
    num_epochs: int = 3
    seed: int = 0
    """Also set in torch, numpy and random before the run."""
    shuffle: bool = True
    drop_last: bool = False
    """Drop samples that do not fill a batch on every rank, instead of repeating some."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sample, for `--batch-sampler`."""
    tokens_per_batch: int = 0
    """Largest number of tokens of a batch, for `--batch-sampler`."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point of an interruption: after `num_batches` batches of `epoch`, both from 0."""

    epoch: int
    num_batches: int
    state: object = None
    """Result of the interrupted run's `state_dict()`; None without such a method."""


class OpenRun(Protocol):
    """`--sampler` and `--batch-sampler`: the data loop of one rank's training run."""

    def __call__(
        self, plan: LoaderPlan, resumed: ResumePoint | None, /
    ) -> Iterable[Iterable[Sequence[int]]]:
        """Open the loop. Called once per rank.

        Returns: an iterable of epochs from the resumed one on. An epoch is an iterable of batches, a batch
            a sequence of sample numbers. The resumed epoch lacks the batches already seen. The state of a
            `Stateful` result is taken at the interruption.
        """


@runtime_checkable
class Stateful(Protocol):
    """A data loop with a state to resume from."""

    def state_dict(self) -> object:
        """Return the state after the last batch that was drawn."""


class BackwardStep(Protocol):
    """`--accumulation`: forward and backward passes of one optimizer step on one rank."""

    def __call__(
        self,
        model: "nn.Module",
        micro_batches: Sequence[Mapping[str, "Tensor"]],
        num_step_tokens: int,
        num_ranks: int,
        /,
    ) -> None:
        """Leave this rank's gradients in the model's parameters.

        model: of transformers; micro_batches: this rank's, with `input_ids`, `attention_mask` and
            `labels`; num_step_tokens: label tokens of the step in all micro-batches on all ranks;
            num_ranks: number of ranks whose gradients are averaged afterwards, as in DDP and FSDP.
        """


class OpenLoader(Protocol):
    """`--loader`: a DataLoader with your seeding of workers."""

    def __call__(
        self, dataset: Sequence[Sequence[int]], num_workers: int, rank: int, /
    ) -> Iterable[Iterable[object]]:
        """Wrap `dataset`. Called once per run, after torch, numpy and random were seeded.

        Returns: an object that is iterated once per epoch. Its batches hold unchanged items of `dataset`:
            use `collate_fn=list`.
        """


class MakeDataset(Protocol):
    """`--dataset`: a dataset with random augmentation or masking."""

    def __call__(self, samples: Sequence[Feature], /) -> Sequence[object]:
        """Make the dataset. Called once per run.

        samples: equal ones, so that only random numbers make items differ.
        Returns: a map-style dataset of as many items.
        """
