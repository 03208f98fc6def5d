"""TRL's SFTTrainer as a trainer of `assay check train --candidate-trainer trl`.

SFTTrainer provides the collator, which pads micro-batches on the right, the count of label tokens, the
loss with its fused head, accumulation, backward, clipping, the adapter, and saving of the model. The
plan provides the order of micro-batches and the optimizer. Each step is a `train()` of one optimizer
step, so a resume restores only what this class saves. With dropout, whose masks depend on positions,
a micro-batch keeps its padding on the left.

Shapes: B rows, T tokens.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from assay.errors import UsageError
from assay.models.candidate_code import set_up
from assay.models.config_files import load_tokenizer
from assay.models.sources import local_folder, resolve_model
from assay.models.transformers_calls import quiet_transformers
from assay.training.batches import check_batch
from assay.training.protocol import NEXT_TOKEN, MicroBatch, StepReport, TrainerTraits, TrainingPlan
from assay.training.trainers.adapters import lora_config
from assay.training.trainers.reference import ReferenceTrainer
from assay.watchdog import temporary_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

try:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    raise UsageError(
        f"the trainer trl needs TRL: pip install 'assay-smoke[trl]' ({error})"
    ) from error


class _Row(TypedDict):
    """An example in TRL's prepared form: unpadded, with labels of -100 on tokens without a loss."""

    input_ids: list[int]
    labels: list[int]


class _Loop(SFTTrainer):
    """An SFTTrainer that routes loss and clipping through `owner`, which calls it back."""

    owner: "TRLTrainer"
    own_batch: Sequence[MicroBatch]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's micro-batches of one step, collated by TRL."""
        batch: Any = list(self.own_batch)
        collate: Any = self._collate
        # Its own generator: the loader must not use random numbers of training.
        own = torch.Generator()
        return DataLoader(batch, batch_size=None, collate_fn=collate, generator=own)

    def _collate(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        starts_padded = bool((micro_batch["attention_mask"][:, 0] == 0).any())
        if starts_padded and _has_dropout(self.owner.model):
            return dict(micro_batch)
        rows: Any = _rows_of(micro_batch)
        collated: dict[str, Tensor] = self.data_collator(rows)
        return collated

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - SFTTrainer's signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss of one micro-batch."""
        del return_outputs
        self._network = model
        self._num_items = num_items_in_batch  # None: SFTTrainer counts the micro-batch's
        return self.owner.compute_loss(inputs, int(num_items_in_batch or 0))

    def loss_of_the_library(self, inputs: dict[str, Any]) -> Tensor:
        """Compute SFTTrainer's loss with its own count of label tokens.

        On N ranks it multiplies the loss by N, since DistributedDataParallel averages gradients.
        """
        compute_loss: Any = super().compute_loss
        loss: Tensor = compute_loss(self._network, inputs, num_items_in_batch=self._num_items)
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> float:
        del model
        return self.owner.clip_gradients(self.args.max_grad_norm)

    def clipped_by_the_library(self) -> float:
        """Clip as SFTTrainer does. Returns: the norm before."""
        clip: Any = super()._clip_grad_norm
        return float(clip(self.model))


class TRLTrainer(ReferenceTrainer):
    """SFTTrainer on one or several data-parallel ranks. Each step is a `train()` of one optimizer step.

    On several ranks, accelerate wraps the model into DistributedDataParallel.
    """

    features = frozenset({"lora", "recompute"})
    losses = frozenset({NEXT_TOKEN})
    # The fused loss never computes whole logits.
    traits = TrainerTraits(unmeasured_ports=frozenset({("", "output.logits")}))
    reduce_gradients = None  # type: ignore[assignment]  # DistributedDataParallel reduces in backward

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """Build the model as SFTTrainer does, including its adapter."""
        base: Any = set_up(self.load_pretrained(plan.model), plan.setup)
        lora = lora_config(base, plan.adapter_dropout) if "lora" in plan.features else None
        tokenizer = self._find_tokenizer()
        # SFTTrainer creates the folder and never writes to it.
        with temporary_folder("assay-trl-") as folder:
            self._loop = _Loop(
                model=base,
                args=self._arguments(plan, folder),
                train_dataset=Dataset.from_list([_Row(input_ids=[0, 0], labels=[0, 0])]),
                processing_class=tokenizer or _placeholder_tokenizer(base),
                peft_config=lora,
            )
        if tokenizer is None:
            self._loop.processing_class = None  # must not be saved with the model
        self._loop.owner = self
        self._loop.remove_callback(PrinterCallback)
        self._backward_of_the_library = self._loop.accelerator.backward
        self._loop.accelerator.backward = lambda loss, **_: self.backward(loss)
        model: Any = self._loop.model
        adapted: nn.Module = model.train()
        self.freeze(adapted)
        return adapted

    def _arguments(self, plan: TrainingPlan, folder: Path) -> SFTConfig:
        with warnings.catch_warnings():
            # TRL 1.16 uses the old name of recomputation in transformers 5.23.
            warnings.simplefilter("ignore", FutureWarning)
            return SFTConfig(
                output_dir=str(folder),
                max_steps=1,
                gradient_accumulation_steps=plan.micro_batches // self.data.size,
                learning_rate=plan.learning_rate,
                lr_scheduler_type="constant",
                max_grad_norm=plan.max_grad_norm,
                gradient_checkpointing="recompute" in plan.features,
                # TRL's default is autocast, but parameters already have the dtype of the run.
                bf16=False,
                use_cpu=self.device.torch_device == "cpu",
                router_aux_loss_coef=0.0,  # the reference trains the token loss alone
                dataset_kwargs={"skip_prepare_dataset": True},
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                seed=plan.seed,
            )

    def _find_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Load the model's tokenizer, or return None without one."""
        with local_folder(resolve_model(self.plan.model), self.plan.remote_code) as folder:
            if not any(folder.glob("tokenizer*")):
                return None
            tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, self.plan.remote_code)
            return tokenizer

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the plan's AdamW. TRL's own does not decay weights of norms."""
        optimizer = super().build_optimizer(model)
        self._loop.optimizer = optimizer
        self._step_of_torch = optimizer.step
        optimizer.step = lambda *_, **__: self.optimizer_step()  # type: ignore[method-assign, assignment]
        return optimizer

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one step by SFTTrainer's `train()`."""
        num_tokens = check_batch(batch)
        self._total, self._norm = 0.0, math.nan
        self._loop.own_batch = batch[self.data.index :: self.data.size]
        with self.device.execution(), quiet_transformers():
            self._loop.train()
        self._num_steps += 1
        # Each rank has multiplied its loss by the number of ranks.
        of_all = self.data.sum(torch.tensor(self._total, dtype=torch.float64)) / self.data.size
        return StepReport(
            self._num_steps - 1, float(of_all), num_tokens, self._norm, self.plan.learning_rate
        )

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        """Compute TRL's loss by its fused head over the label tokens of the step."""
        del num_step_tokens
        loss = self._loop.loss_of_the_library(dict(micro_batch))
        self._total += float(loss.detach())
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` by accelerate."""
        self._backward_of_the_library(loss)

    def clip_gradients(self, max_norm: float) -> float:
        """Clip by SFTTrainer, to the norm in its arguments."""
        del max_norm
        self._norm = self._loop.clipped_by_the_library()
        return self._norm

    def optimizer_step(self) -> None:
        """Update the parameters."""
        self._step_of_torch()

    def save_model(self, folder: Path) -> None:
        """Save the model or its adapter by SFTTrainer."""
        with quiet_transformers():
            self._loop.save_model(str(folder))

    def teardown(self) -> None:
        """Release model, optimizer and SFTTrainer."""
        del self._loop
        super().teardown()


def _has_dropout(model: nn.Module) -> bool:
    attention = getattr(cast("PreTrainedModel", model).config, "attention_dropout", 0.0)
    return attention > 0 or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )


def _rows_of(micro_batch: Mapping[str, Tensor]) -> list[_Row]:
    """Return the rows of a micro-batch without padding."""
    ids_BT, labels_BT = micro_batch["input_ids"], micro_batch["labels"]
    tokens_BT = micro_batch["attention_mask"] != 0
    return [
        _Row(input_ids=ids_T[tokens_T].tolist(), labels=labels_T[tokens_T].tolist())
        for ids_T, labels_T, tokens_T in zip(ids_BT, labels_BT, tokens_BT, strict=True)
    ]


def _placeholder_tokenizer(model: nn.Module) -> PreTrainedTokenizerFast:
    """Make a tokenizer for a model without one. Only its pad token is used."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = cast("PreTrainedModel", model).config.get_text_config()
    words = Tokenizer(WordLevel({str(id_): id_ for id_ in range(config.vocab_size)}, "0"))
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=str(pad), eos_token=str(pad))
