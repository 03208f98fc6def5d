"""Training steps of tiny models on one process, and their comparison with a sharded run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from assay.models import load_model
from assay.models.transformers_calls import quiet_transformers
from assay.parallel.pipeline import clip_gradients
from packages.core.tests.subsystem.parallel.judging import plain, relative_error
from packages.core.tests.subsystem.parallel.tiny_models import VOCABULARY, build_model

STEPS = 3
MAX_NORM = 0.5
NUM_LAYERS = 4

# What float32 rounding leaves where sums are taken in another order; the largest that was seen over
# all architectures and schedules: losses 4.8e-7, gradients 8.2e-6, updates 7.5e-5.
LOSS_TOLERANCE = 5e-6
GRADIENT_TOLERANCE = 5e-5
UPDATE_TOLERANCE = 5e-4

# Where both are one parameter, the last stage has it under the name of the head.
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass
class Record:
    """The results of training steps, by the names of the whole model's parameters.

    gradients: of the first step, before clipping. updates: by all steps.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)


def model_options(architecture: str) -> dict[str, Any]:
    options: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    if architecture == "mixtral":
        options["output_router_logits"] = False
    return options


def write_model(architecture: str, folder: Path, **options: Any) -> Path:
    model: Any = build_model(architecture, **model_options(architecture) | options)
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size="50KB")
    return folder


def step_batch(step: int, *, num: int = 4, rows: int = 2) -> list[dict[str, Tensor]]:
    """Micro-batches of different lengths, each with one padded row and other label counts."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch = []
    for number in range(num):
        length = 8 + 3 * number
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(1, rows):
            mask[row, length - 1 - row - number :] = 0
        ids[mask == 0] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        batch.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batch


def num_label_tokens(batch: Iterable[Mapping[str, Tensor]]) -> int:
    return sum(int((micro_batch["labels"][:, 1:] != -100).sum()) for micro_batch in batch)


def token_loss(model: nn.Module, micro_batch: Mapping[str, Tensor], num_tokens: int) -> Tensor:
    logits = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"])
    logits = getattr(logits, "logits", logits).float()
    return (
        functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        / num_tokens
    )


def run_micro_batch(model: nn.Module, micro_batch: Mapping[str, Tensor], num_tokens: int) -> Tensor:
    """Its loss, after its gradients were added up."""
    loss = token_loss(model, micro_batch, num_tokens)
    loss.backward()
    return loss.detach()


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # An epsilon of the size of gradients: with a tiny one the first update is the sign of the
    # gradient, and rounding decides what becomes of elements near zero.
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-3, foreach=False)


def train_alone(
    model: nn.Module,
    *,
    steps: int = STEPS,
    rows: int = 2,
    run: Callable[[nn.Module, Mapping[str, Tensor], int], Tensor] = run_micro_batch,
) -> Record:
    """The oracle: one process, one micro-batch after the other, torch's own clipping."""
    record = Record()
    optimizer = build_optimizer(model.parameters())
    before = named_values(model.named_parameters())
    for step in range(steps):
        batch = step_batch(step, rows=rows)
        optimizer.zero_grad()
        losses = [run(model, part, num_label_tokens(batch)).item() for part in batch]
        if step == 0:
            record.gradients = named_gradients(model.named_parameters())
        record.losses.append(sum(losses))
        record.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    record.updates = updates_since(before, model.named_parameters())
    return record


def train_alone_in_bfloat16(folder: Path) -> Record:
    """One process that rounds where FSDP2 does: only sums in float32 can differ.

    Weights are kept in float32 and rounded for each micro-batch; gradients are added in float32.
    """
    rounded = load_whole(folder)

    def run(model: nn.Module, micro_batch: Mapping[str, Tensor], num_tokens: int) -> Tensor:
        pairs = [*zip(model.parameters(), rounded.parameters(), strict=True)]
        for own, copy in pairs:
            copy.grad = None
            copy.data = own.data.bfloat16()
        loss = run_micro_batch(rounded, micro_batch, num_tokens)
        for own, copy in pairs:
            assert copy.grad is not None
            wide = copy.grad.float()
            own.grad = wide if own.grad is None else own.grad + wide
        return loss

    return train_alone(load_whole(folder), run=run)


def named_values(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: plain(parameter) for name, parameter in named}


def named_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: plain(parameter.grad) for name, parameter in named if parameter.grad is not None}


def updates_since(
    before: Mapping[str, Tensor], named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    return {name: plain(parameter) - before[name] for name, parameter in named}


def disagreements(actual: Record, expected: Record) -> list[str]:
    """All that differs on any rank, the same list on all of them.

    What no rank has, and what a rank has beyond the expected, is a disagreement too.
    """
    found = _differing_numbers("loss", actual.losses, expected.losses, LOSS_TOLERANCE)
    found += _differing_numbers("norm", actual.norms, expected.norms, GRADIENT_TOLERANCE)
    names: dict[str, list[str]] = {}
    for kind, limit in (("gradients", GRADIENT_TOLERANCE), ("updates", UPDATE_TOLERANCE)):
        of_actual, of_expected = getattr(actual, kind), getattr(expected, kind)
        names[kind] = [*of_actual]
        for name, tensor in of_actual.items():
            own = name if name in of_expected else name.replace(_HEAD, _EMBEDDING)
            if own not in of_expected:
                found.append(f"{kind} of {name}: unexpected")
            elif not relative_error(tensor, of_expected[own]) <= limit:
                found.append(f"{kind} of {name}")
    return _over_ranks(found, names, expected)


def _differing_numbers(
    kind: str, actual: Sequence[float], expected: Sequence[float], limit: float
) -> list[str]:
    if not expected or len(actual) != len(expected):
        return [f"{kind}: {len(actual)} values, expected {len(expected)}"]
    return [
        f"{kind} of step {step}"
        for step, (mine, other) in enumerate(zip(actual, expected, strict=True))
        if not abs(mine - other) <= limit * max(1.0, abs(other))
    ]


def _over_ranks(found: list[str], names: dict[str, list[str]], expected: Record) -> list[str]:
    everything: list[Any] = [(found, names)]
    if dist.is_initialized():
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, (found, names))
    united = {text for texts, _ in everything for text in texts}
    for kind in ("gradients", "updates"):
        held = {name for _, of_rank in everything for name in of_rank[kind]}
        wanted = getattr(expected, kind).keys()
        united |= {f"{kind} of {name}: on no rank" for name in wanted - held}
        united |= set() if wanted else {f"{kind}: nothing expected"}
    return sorted(united)


def train_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    steps: Iterable[int],
    record: Record,
    *,
    clip: Callable[..., Tensor] = clip_gradients,
    reduce: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Add `steps` to `record`: of each, every rank of `mesh` takes some micro-batches in turn."""
    for step in steps:
        batch = step_batch(step)
        mine = batch[mesh.get_local_rank() :: mesh.size()]
        optimizer.zero_grad()
        total = torch.zeros((), device=mesh.device_type)
        for micro_batch in to_device(mine, mesh.device_type):
            total += run_micro_batch(model, micro_batch, num_label_tokens(batch))
        dist.all_reduce(total, group=mesh.get_group())
        reduce(model)
        if not record.gradients:
            record.gradients = named_gradients(model.named_parameters())
        record.losses.append(total.item())
        record.norms.append(float(clip([*model.parameters()], MAX_NORM)))
        optimizer.step()


def to_device(batch: Iterable[Mapping[str, Tensor]], device: str) -> list[dict[str, Tensor]]:
    return [{name: tensor.to(device) for name, tensor in part.items()} for part in batch]


def load_whole(folder: Path, device: str = "cpu") -> nn.Module:
    loaded = load_model(str(folder), dtype="float32", device=device, attention="eager")
    return loaded.model.train()
