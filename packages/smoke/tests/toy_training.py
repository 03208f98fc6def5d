"""A fake training loop in half a second, whose numbers depend on everything before them.

Its checkpoints are real Hugging Face folders or adapters. FAULT in its environment plants a fault.
"""

import argparse
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[np.float32]]

FROZEN = "model.embed_tokens.weight"
STUCK = "model.norm.weight"
ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"

fault = os.environ.get("FAULT", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--keep", type=int, default=100)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--like-another", action="store_true", help="see `another_library`")
    arguments = parser.parse_args()
    if fault == "not installed":
        importlib.import_module("no_such_library")
    if arguments.like_another:
        another_library(arguments)
    else:
        Toy(arguments).train()


def another_library(arguments: argparse.Namespace) -> None:
    """Resume from the newest state in the output, log JSON, count epochs from 0, and draw a progress bar."""
    epochs = len(list(arguments.output.glob("states/epoch_*")))
    if epochs:
        (arguments.output / "resumed").mkdir()
        arguments.resume_from = arguments.output / f"states/epoch_{epochs - 1}"
    toy = Toy(arguments)
    for step in range(toy.begin + 1, arguments.steps + 1):
        line = json.dumps({"global_step": step - 1, "train/loss": toy.step(step)})
        with (arguments.output / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        sys.stdout.write(f"\r{step}/{arguments.steps}")
        if step % arguments.save_every == 0:
            toy.save(step)
            epoch = step // arguments.save_every - 1
            saved = arguments.output / f"step-{step}"
            shutil.copytree(saved, arguments.output / f"states/epoch_{epoch}")
            saved.rename(arguments.output / f"epoch_{epoch}")


class Toy:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begin = 0
        self.weights = self.read(arguments.resume_from or arguments.model)
        self.moments = {name: np.zeros_like(one) for name, one in self.weights.items()}
        if arguments.resume_from:
            state = np.load(arguments.resume_from / "state.npz")
            self.begin = int(state["step"])
            if fault == "model one step old":
                self.weights = {name: state[f"weights {name}"] for name in self.weights}
            if "moments dropped" not in fault:
                self.moments = {name: state[name] for name in self.weights}
        self.saved: list[Path] = []
        self.terminated = False
        if fault != "dies of SIGTERM":
            signal.signal(signal.SIGTERM, self.terminate)

    def read(self, folder: Path) -> Tensors:
        if not self.arguments.adapter:
            return read_floats(folder / "model.safetensors")
        if self.arguments.resume_from:
            return load_file(folder / "adapter_model.safetensors")
        random = np.random.default_rng(0)
        first = random.normal(size=(2, 96)).astype(np.float32)
        return {
            f"{ADAPTED}.lora_A.weight": first,
            f"{ADAPTED}.lora_B.weight": np.zeros((96, 2), np.float32),
        }

    def terminate(self, *_: object) -> None:
        self.terminated = fault != "ignores SIGTERM"

    def train(self) -> None:
        for step in range(self.begin + 1, self.arguments.steps + 1):
            loss = self.step(step)
            if fault == "NaN" and step == 5:
                loss = float("nan")
            if fault != "no losses" and not (fault == "every second loss" and step % 2):
                sys.stdout.write(f"step {step} loss {loss!r} lr {self.learning_rate(step):.4g}\n")
            if fault == "killed" and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % self.arguments.save_every == 0 or self.terminated:
                is_named_last = self.terminated and fault == "SIGTERM saved as the end"
                self.save(self.arguments.steps if is_named_last else step)
            if self.terminated:
                return
            time.sleep(self.arguments.pause)
        self.end()

    def learning_rate(self, step: int) -> float:
        """Decrease linearly from 1e-3 to zero in ten calls of the schedule."""
        num_calls = 2 * (step - 1) if fault == "schedule stepped twice" else step - 1
        if fault == "schedule restarted" and self.begin:
            num_calls -= self.begin
        if fault == "warmup" and not num_calls:
            return 0.0
        return max(0.0, 1e-3 * (1 - num_calls / 10))

    def step(self, step: int) -> float:
        seed = [self.arguments.seed, step]
        if "not deterministic" in fault:
            seed.append(time.time_ns())
        drawn = [time.time_ns()] if "not seeded" in fault else [self.arguments.seed, step]
        random = np.random.default_rng(drawn)
        noise = np.random.default_rng(seed)
        loss = sum(float(np.abs(one).mean()) for one in self.weights.values())
        if fault in ("no labels", "labels in the first step only") and step > (
            fault != "no labels"
        ):
            loss = 0.0
        if fault == "loss of constants":
            loss = 2.30258512
        self.before = {name: one.copy() for name, one in self.weights.items()}
        for name, weight in self.weights.items():
            if name == FROZEN and fault != "frozen parameter moves":
                continue
            if name == STUCK and fault == "parameter stuck":
                continue
            if "lora_B" in name and fault == "adapter empty":
                continue
            if fault in ("gradients are zero", "gradients are zero after a save"):
                is_learning = fault != "gradients are zero" and step <= self.arguments.save_every
                weight *= np.float32(0.9999)  # noqa: PLW2901 - in place
                weight -= np.float32(1e-3 * is_learning) * random.normal(size=weight.shape)  # noqa: PLW2901
                continue
            gradient = random.normal(size=weight.shape)
            size = 1e-7 if "in the last digit" in fault else 1e-3
            gradient += size * noise.normal(size=weight.shape)
            self.moments[name] = (0.9 * self.moments[name] + gradient).astype(np.float32)
            is_still = fault == "frozen after a resume" and self.begin
            rate = 0.0 if is_still or (fault == "warmup" and step == 1) else 1e-3
            weight -= np.float32(rate) * self.moments[name]  # noqa: PLW2901 - in place
        return loss

    def save(self, step: int) -> None:
        folder = self.arguments.output / f"step-{step}"
        if fault == "no checkpoints":
            return
        folder.mkdir(parents=True)
        weights = dict(self.weights)
        if fault == "checkpoint repeats" and self.saved:
            weights = self.read(self.saved[-1])
        if fault == "shard of zeros" and step == 4:
            weights["model.layers.2.mlp.up_proj.weight"] *= 0
        if fault == "disk full" and step == 4:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        is_old = fault in ("model one step old", "resumes a model one step old")
        self.write(self.before if is_old else weights, folder)
        state: dict[str, Any] = {"step": step, **self.moments}
        state |= {f"weights {name}": one for name, one in self.weights.items()}
        np.savez(folder / "state.npz", **state)
        if fault == "torn checkpoint" and step == 4:
            os.truncate(folder / "model.safetensors", 10_000)
        self.saved.append(folder)
        if fault != "keeps all" and len(self.saved) > self.arguments.keep:
            shutil.rmtree(self.saved.pop(0))

    def write(self, weights: Tensors, folder: Path) -> None:
        if not self.arguments.adapter:
            shutil.copy(self.arguments.model / "config.json", folder)
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            return
        if fault == "adapter without tensors":
            weights = {}
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
        config |= {"target_modules": ["layers.0.self_attn.q_proj"], "inference_mode": True}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    def end(self) -> None:
        if fault == "model written to":
            (self.arguments.model / "config.json").touch()
        if fault == "process left":
            subprocess.Popen([sys.executable, "-c", WAIT], start_new_session=True)
        if fault == "file left":
            Path(os.environ["TMPDIR"], "shard.lock").touch()
        if "aborts after training" in fault:
            sys.stderr.write("terminate called after throwing an instance of 'c10::Error'\n")
            sys.stderr.write("  what():  Connection closed by peer\n")
            sys.stderr.flush()
            os.abort()
        if fault == "hang in tear-down":
            time.sleep(1000)


def read_floats(path: Path) -> Tensors:
    """Read the tensors of a file in float32. numpy has no bfloat16."""
    found = {}
    for name, one in deserialize(path.read_bytes()):
        if one["dtype"] == "BF16":
            values = (np.frombuffer(one["data"], np.uint16).astype(np.uint32) << 16).view(
                np.float32
            )
        else:
            values = np.frombuffer(one["data"], np.float32).copy()
        found[name] = values.reshape(one["shape"])
    return dict(sorted(found.items()))  # numbers are drawn in this order


WAIT = "import time; time.sleep(1000)"

if __name__ == "__main__":
    main()
