"""A training script in numpy that splits the rows of a step, in half a second.

Rows have unequal numbers of tokens. Each token draws a target for every weight. The loss is the mean
squared distance to the targets. Ranks are simulated in turn. FAULT in its environment plants a fault.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from toy_training import read_floats  # type: ignore[import-not-found]  # in the script's folder

Tensors = dict[str, NDArray[np.float32]]

DECAY = 0.1

fault = os.environ.get("FAULT", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--clip", type=float, default=float("inf"))
    parser.add_argument(
        "--scale-free", action="store_true", help="update by directions, as Adam does"
    )
    Script(parser.parse_args()).train()


class Script:
    """Weights, momentum and schedule of one run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.weights: Tensors = read_floats(
            (arguments.resume_from or arguments.model) / "model.safetensors"
        )
        self.momentum = {name: np.zeros_like(one) for name, one in self.weights.items()}
        self.begin, self.num_scheduled = 0, 0
        if arguments.resume_from:
            state = np.load(arguments.resume_from / "state.npz")
            self.begin, self.num_scheduled = int(state["step"]), int(state["num_scheduled"])
            self.momentum = {name: state[name] for name in self.weights}

    def train(self) -> None:
        for step in range(self.begin + 1, self.arguments.steps + 1):
            sys.stdout.write(f"step {step} loss {self.step(step):.9g} norm {self.norm:.9g}\n")
            if step % self.arguments.save_every == 0:
                self.save(step)

    def step(self, step: int) -> float:
        arguments = self.arguments
        num_rows = arguments.batch_size * arguments.accumulation * arguments.ranks
        first = (step - 1) * num_rows
        rows = list(range(first, first + num_rows))
        if fault == "ends early" and arguments.accumulation == 1:
            raise SystemExit("this batch does not fit")
        if fault == "not seeded":
            rows = [time.time_ns() % 2**40 + row for row in rows]
        if fault == "rows depend on the split":
            rows = [row * arguments.accumulation * arguments.ranks for row in rows]
        if fault == "last row of a rank dropped":
            del rows[arguments.batch_size * arguments.accumulation - 1]
        per_rank = -(-len(rows) // arguments.ranks)
        on_ranks = [
            self.gradient_of(rows[rank * per_rank :][:per_rank], rows)
            for rank in range(arguments.ranks)
        ]
        reduced = on_ranks[:1] if fault == "ranks not reduced" else on_ranks
        gradient = added([one for _, one in reduced])
        if fault == "ranks averaged":
            gradient = scaled(gradient, 1 / arguments.ranks)
        if fault != "clipped once a micro-batch":
            self.clip(gradient)
        self.norm = norm_of(gradient)
        if arguments.scale_free:
            scale(gradient, 1 / self.norm)
        self.update(gradient)
        self.num_scheduled += arguments.ranks if fault == "schedule stepped once a rank" else 1
        if fault == "loss of one rank logged":
            return float(on_ranks[0][0] * arguments.ranks)
        return sum(loss for loss, _ in on_ranks)

    def gradient_of(self, rows: list[int], all_rows: list[int]) -> tuple[float, Tensors]:
        """Return one rank's share of the step's loss and gradient."""
        size = self.arguments.batch_size
        batches = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        num_batches = len(batches) * self.arguments.ranks
        num_tokens = sum(map(tokens_of, all_rows))
        loss, gradient = 0.0, scaled(self.weights, 0)
        for number, batch in enumerate(batches):
            own = sum(map(tokens_of, batch))
            share = 1 / num_tokens
            if fault == "mean of means":
                share = 1 / own / num_batches
            if fault == "loss not divided":
                share = 1 / own
            summed, of_batch = self.backward(batch)
            loss += summed * share
            is_last = number == len(batches) - 1
            if fault == "last micro-batch skipped" and is_last:
                continue
            if fault == "only the last micro-batch" and not is_last:
                continue
            if fault == "only the first micro-batch" and number:
                continue
            of_batch = scaled(of_batch, share)
            if fault == "gradient scaled by micro-batches":
                of_batch = scaled(of_batch, 1 / num_batches)
            if fault == "clipped once a micro-batch":
                self.clip(of_batch)
            gradient = added([gradient, of_batch])
            if not is_last:
                self.misplaced(gradient)
        return loss, gradient

    def misplaced(self, gradient: Tensors) -> None:
        """Run faults that act after each micro-batch but the last."""
        if fault == "schedule stepped once a micro-batch":
            self.num_scheduled += 1
        if fault == "optimizer stepped once a micro-batch":
            self.update(gradient)
            scale(gradient, 0)
        if fault == "decayed once a micro-batch":
            self.decay()

    def backward(self, rows: list[int]) -> tuple[float, Tensors]:
        """Return the summed loss of the tokens of some rows, and its gradient."""
        tokens = [np.random.default_rng([row, t]) for row in rows for t in range(tokens_of(row))]
        loss, gradient = 0.0, Tensors()
        for name, weight in sorted(self.weights.items()):
            drawn = [one.standard_normal(weight.shape, np.float32) for one in tokens]
            errors = [weight - np.float32(2) * one for one in drawn]
            loss += sum(float(np.square(one).mean()) for one in errors)
            gradient[name] = np.asarray(np.sum(errors, axis=0))
        if fault == "masks by rank":
            kept = float(np.random.default_rng(rows).uniform(0.9, 1.1))
            return loss * kept, scaled(gradient, kept)
        return loss, gradient

    def clip(self, gradient: Tensors) -> None:
        scale(gradient, min(1.0, self.arguments.clip / (norm_of(gradient) or 1.0)))

    def learning_rate(self) -> float:
        return 0.05 * (1 - self.num_scheduled / 20)

    def decay(self) -> None:
        scale(self.weights, 1 - self.learning_rate() * DECAY)

    def update(self, gradient: Tensors) -> None:
        self.decay()
        self.momentum = added([scaled(self.momentum, 0.9), gradient])
        self.weights = added([self.weights, scaled(self.momentum, -self.learning_rate())])

    def save(self, step: int) -> None:
        folder = self.arguments.output / f"step-{step}"
        folder.mkdir(parents=True)
        config = json.loads((self.arguments.model / "config.json").read_text(encoding="utf-8"))
        config |= {"attention_dropout": 0.1} if fault == "dropout" else {}
        if fault != "writes no configuration" or self.arguments.accumulation > 1:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        np.savez(folder / "state.npz", step=step, num_scheduled=self.num_scheduled, **self.momentum)


def tokens_of(row: int) -> int:
    """Return one to five tokens, in an order unrelated to the split."""
    return 1 + row * 7 % 5


def norm_of(tensors: Tensors) -> float:
    return float(sum(float(np.square(one).sum()) for one in tensors.values()) ** 0.5)


def scale(tensors: Tensors, factor: float) -> None:
    for name in tensors:
        tensors[name] *= np.float32(factor)


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: np.float32(factor) * one for name, one in tensors.items()}


def added(several: list[Tensors]) -> Tensors:
    return {name: np.sum([one[name] for one in several], axis=0) for name in several[0]}


if __name__ == "__main__":
    main()
