"""Train micro models on the text of Python's standard library.

Shapes: B rows of a batch, T tokens of a row.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from assay.errors import UsageError
from assay.models.load import limited_threads, load_model
from assay.models.micro.recipes import (
    BOS_ID,
    MASK_ID,
    PROVENANCE,
    MicroRecipe,
    find_recipe,
    new_model,
    save_model,
    standard_library_text,
)

_LOWEST, _HIGHEST = 0.01, 2.5  # frequencies in radians per position
_POSITION_SCALE = 0.2  # twice the standard deviation of the token embeddings
_SHARPNESS = 2.0


def attend_to_neighbors(model: PreTrainedModel, num_heads: int) -> None:
    """Initialize a BERT or RoBERTa in place: sinusoidal positions, heads that attend to neighbors.

    From random position embeddings, a masked language model does not learn in a few steps which
    positions are adjacent. After 800 steps the loss was 3.04 nats per masked byte, hardly below that of
    byte frequencies; from these initial weights it was 2.33.

    Head h attends to offset h - num_heads // 2. Its query shifts the phase of each of its frequencies
    by that offset, so that the product with a key, a sum of
    cos(frequency * (position + offset - other position)), is largest at the neighbor.
    """
    encoder: nn.Module = model.base_model
    positions = encoder.get_parameter("embeddings.position_embeddings.weight")
    attention = "encoder.layer.0.attention.self"
    query = encoder.get_parameter(f"{attention}.query.weight")
    key = encoder.get_parameter(f"{attention}.key.weight")
    num_positions, hidden_size = positions.shape
    half, head_size = hidden_size // 2, hidden_size // num_heads
    decay = torch.arange(half) / (half - 1)
    frequencies = _HIGHEST * (_LOWEST / _HIGHEST) ** decay
    phases = torch.arange(num_positions)[:, None] * frequencies
    with torch.no_grad():
        positions.copy_(_POSITION_SCALE * torch.cat([phases.sin(), phases.cos()], dim=1))
        query.zero_()
        key.zero_()
        for head in range(num_heads):
            turns = frequencies * (head - num_heads // 2)
            for pair in range(head_size // 2):
                sine, cosine = 2 * pair, half + 2 * pair
                row = head * head_size + 2 * pair
                cos_turn, sin_turn = turns[2 * pair].cos(), turns[2 * pair].sin()
                query[row, sine], query[row, cosine] = cos_turn, sin_turn
                query[row + 1, cosine], query[row + 1, sine] = cos_turn, -sin_turn
                key[row, sine] = key[row + 1, cosine] = 1.0
        query.mul_(_SHARPNESS)
        key.mul_(_SHARPNESS)


Progress = Callable[[int, int, float], None]

_TOKENS = 256
# Every 16th batch is long, to train positions over 1,000.
_LONG_EVERY, _LONG_ROWS, _LONG_TOKENS = 16, 1, 1088
_WARM_UP_SHARE = 0.06
_MASKED_SHARE = 0.25
_HELD_OUT_BYTES = 2**16
_BALANCE_WEIGHT = 0.02  # of the loss that spreads tokens over experts
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Result of a training. Losses are on held-out text, with weights rounded to bfloat16."""

    folder: Path
    held_out_loss: float
    held_out_loss_long: float
    loss_unit: str
    num_parameters: int
    seconds: float


def build_model(
    recipe_name: str, folder: Path, progress: Progress, *, seed: int = 0, num_threads: int = 2
) -> BuildReport:
    """Train a recipe, and write it to `folder` as a Hugging Face folder with its provenance.

    The same seed, thread count and versions produce the same weights.
    progress: called with step, number of steps and training loss.
    Raises: UsageError if there is no such recipe or the folder is not empty.
    """
    recipe = find_recipe(recipe_name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in standard_library_text()
    )
    start = time.perf_counter()
    with limited_threads(num_threads):
        model = new_model(recipe, seed).train()
        if recipe.masked:
            attend_to_neighbors(model, model.config.num_attention_heads)
        _train(model, recipe, training, seed, progress)
        save_model(model, folder)
        rounded = load_model(str(folder), dtype="float32").model
        loss = _held_out_loss(rounded, recipe, held_out, _TOKENS)
        loss_long = _held_out_loss(rounded, recipe, held_out, _LONG_TOKENS)
    report = BuildReport(
        folder,
        loss,
        loss_long,
        "nats per masked byte" if recipe.masked else "nats per byte",
        sum(parameter.numel() for parameter in rounded.parameters()),
        time.perf_counter() - start,
    )
    _write_provenance(report, recipe, seed=seed, num_threads=num_threads)
    return report


def _train(
    model: nn.Module, recipe: MicroRecipe, text: Tensor, seed: int, progress: Progress
) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = [value for value in model.parameters() if value.dim() > 1]
    vectors = [value for value in model.parameters() if value.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    warm_up = max(1, int(recipe.steps * _WARM_UP_SHARE))

    def share(step: int) -> float:
        return min((step + 1) / warm_up, (recipe.steps - step) / (recipe.steps - warm_up))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(recipe.steps):
        long = step % _LONG_EVERY == _LONG_EVERY - 1
        rows, tokens = (_LONG_ROWS, _LONG_TOKENS) if long else (recipe.rows, _TOKENS)
        starts = torch.randint(0, len(text) - tokens, (rows,), generator=generator)
        loss, balance = _loss(model, recipe, _windows(text, starts, tokens), generator)
        optimizer.zero_grad()
        (loss + _BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, recipe.steps, loss.item())


def _windows(text: Tensor, starts: Tensor, num_tokens: int) -> Tensor:
    """Return token ids (B, T): the begin token and the bytes after each start."""
    offsets = starts[:, None] + torch.arange(num_tokens - 1)
    return functional.pad(text[offsets].long(), (1, 0), value=BOS_ID)


def _loss(
    model: nn.Module, recipe: MicroRecipe, ids_BT: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the mean nats per byte, and the imbalance of the experts (0 without experts)."""
    if recipe.masked:
        chosen_BT = torch.rand(ids_BT.shape, generator=generator) < _MASKED_SHARE
        logits_BTV = model(input_ids=ids_BT.masked_fill(chosen_BT, MASK_ID)).logits
        labels_BT = ids_BT.masked_fill(~chosen_BT, _IGNORED)
        loss = functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=_IGNORED
        )
        return loss, loss.new_zeros(())
    experts = {"output_router_logits": True} if "num_local_experts" in recipe.settings else {}
    outputs = model(input_ids=ids_BT, use_cache=False, **experts)
    loss = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    return loss, outputs.aux_loss if experts else loss.new_zeros(())


@torch.no_grad()
def _held_out_loss(model: nn.Module, recipe: MicroRecipe, text: Tensor, num_tokens: int) -> float:
    """Return the mean nats per byte over `_HELD_OUT_BYTES`, for BERT over the masked bytes."""
    generator = torch.Generator().manual_seed(0)
    num_rows = _HELD_OUT_BYTES // num_tokens
    starts = torch.linspace(0, len(text) - num_tokens, num_rows).long()
    losses = [
        _loss(model, recipe, _windows(text, chunk, num_tokens), generator)[0].item() * len(chunk)
        for chunk in starts.split(2)
    ]
    return sum(losses) / num_rows


def _write_provenance(
    report: BuildReport, recipe: MicroRecipe, *, seed: int, num_threads: int
) -> None:
    files = sorted(path for path in report.folder.iterdir() if path.is_file())
    record = {
        "recipe": recipe.name,
        "command": f"assay models build {recipe.name} --seed {seed} --threads {num_threads}",
        "text": f"standard library of Python {platform.python_version()}",
        "steps": recipe.steps,
        "held_out_loss": round(report.held_out_loss, 4),
        "held_out_loss_long": round(report.held_out_loss_long, 4),
        "loss_unit": report.loss_unit,
        "num_parameters": report.num_parameters,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    text = json.dumps(record, indent=1) + "\n"
    (report.folder / PROVENANCE).write_text(text, encoding="utf-8")
