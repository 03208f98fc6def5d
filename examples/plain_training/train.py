"""A plain PyTorch loop over a Hugging Face model, on the documentation of Python as bytes.

    python train.py --model FOLDER --output runs/plain --steps 9 --save-every 3
    python train.py --model FOLDER --output runs/more --steps 9 --save-every 3 \
        --resume-from runs/plain/step-6

It knows nothing of assay; smoke.toml beside it describes it to `assay smoke`.
"""

import argparse
import pydoc_data.topics
import signal
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TOKENS = 64


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2, help="of each micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of each step")
    parser.add_argument("--resume-from", type=Path, help="a checkpoint of an earlier run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--freeze", default="", help="parameters whose names begin like this")
    return parser.parse_args()


def load_text() -> Tensor:
    """All topics of Python's documentation, one byte an id."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    return torch.tensor(list(text.encode()))


def draw_batch(text: Tensor, num_rows: int) -> Tensor:
    """Return a micro-batch of rows from random places in the text, (num_rows, TOKENS)."""
    starts = torch.randint(len(text) - TOKENS, (num_rows,))
    return torch.stack([text[start : start + TOKENS] for start in starts])


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)

    resumed: Path | None = arguments.resume_from
    model = AutoModelForCausalLM.from_pretrained(resumed or arguments.model, dtype=torch.float32)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (arguments.freeze and name.startswith(arguments.freeze))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, arguments.steps)
    begin = 0
    if resumed is not None:
        state = torch.load(resumed / "trainer.pt")
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["generator"])
        begin = state["step"]

    def save(step: int) -> None:
        folder = arguments.output / f"step-{step}"
        model.save_pretrained(folder)
        state = {
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "generator": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, folder / "trainer.pt")

    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGTERM, interrupt)

    text = load_text()
    for step in range(begin + 1, arguments.steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(arguments.micro_batches):
            ids = draw_batch(text, arguments.rows)
            # All have as many tokens: the mean of their means is that of the step.
            loss = model(input_ids=ids, labels=ids).loss / arguments.micro_batches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        learning_rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        print(f"step {step} loss {total:.9g} lr {learning_rate:.4g} norm {norm:.9g}", flush=True)
        if step % arguments.save_every == 0 or interrupted:
            save(step)
        if interrupted:
            print(f"interrupted after step {step}")
            return


if __name__ == "__main__":
    main()
