"""Faults planted in examples/plain_training fail at their level."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from assay_smoke.external.levels import run_external

EXAMPLE = Path(__file__).parents[4] / "examples/plain_training"

RATES = "learning_rates = [1e-3, 9e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4]"
PATTERN = r"pattern = 'step (?P<step>\d+) loss (?P<loss>\S+)"
END = '\n\nif __name__ == "__main__":\n'


@dataclass(frozen=True)
class Plant:
    """A line of train.py and its faulty replacement."""

    name: str
    line: str
    fault: str
    level: str
    """First level that has to fail."""
    says: str
    """Part of its reason."""
    keys: tuple[str, str] = ("", "")
    """Part of smoke.toml and its replacement."""


PLANTS = (
    Plant(
        "moments dropped at resume",
        'optimizer.load_state_dict(state["optimizer"])',
        'optimizer.load_state_dict(state["optimizer"] | {"state": {}})',
        "resume",
        ": probably, the optimizer's state was lost",
    ),
    Plant(
        "gradients never set to zero",
        "        optimizer.zero_grad()\n",
        "",
        "resume",
        "gradients are left over from earlier steps (a missing zero_grad)",
    ),
    Plant(
        "optimizer dropped at resume",
        'optimizer.load_state_dict(state["optimizer"])',
        "pass",
        "learning-rate",
        "of step 8 of the resumed run is 0.00075, expected 0.0003",
    ),
    Plant(
        "schedule dropped at resume",
        'schedule.load_state_dict(state["schedule"])',
        "pass",
        "learning-rate",
        "of step 7 of the resumed run is 0.001, expected 0.0004",
    ),
    Plant(
        "second checkpoint has the tensors of the first",
        "        model.save_pretrained(folder)\n",
        "        kept = globals().setdefault('kept', {k: v.clone() for k, v in model.state_dict().items()})\n"
        "        model.save_pretrained(folder, state_dict=kept)\n",
        "checkpoint",
        "the checkpoint of step 6 repeats the tensors of step 3",
    ),
    Plant(
        "learning rate stepped once a micro-batch",
        "            total += loss.item()\n",
        "            total += loss.item()\n            optimizer.step(), schedule.step()\n",
        "learning-rate",
        "of step 1 of the uninterrupted run is 0.0008, expected 0.001",
    ),
    Plant(
        "gradients lost but those of the last micro-batch",
        "            loss.backward()\n",
        "            optimizer.zero_grad()\n            loss.backward()\n",
        "equivalent",
        "Are those of a micro-batch or rank lost?",
    ),
    Plant(
        "learning rate stepped once a micro-batch, and not logged",
        "            loss.backward()\n",
        "            loss.backward(), schedule.step()\n",
        "equivalent",
        "The update depends on the split",
        (f"{RATES}\n\n[losses]\n{PATTERN} lr (?P<lr>", f"\n[losses]\n{PATTERN} lr (?:"),
    ),
    Plant(
        "learning rate stepped once a micro-batch, and not declared",
        "            loss.backward()\n",
        "            loss.backward(), schedule.step()\n",
        "learning-rate",
        "of step 1 of the equivalent run is 0.0009, in the uninterrupted run 0.0008",
        (f"{RATES}\n", ""),
    ),
    Plant(
        "gradients not divided",
        "            loss.backward()\n",
        "            (loss * arguments.micro_batches).backward()\n",
        "equivalent",
        "the norm of the gradient of step 1 is",
    ),
    Plant(
        "no checkpoint on SIGTERM",
        "if step % arguments.save_every == 0 or interrupted:",
        "if step % arguments.save_every == 0:",
        "sigterm",
        "no checkpoint holds step",
    ),
    Plant(
        "hangs in tear-down",
        END,
        "\n    import threading\n\n    threading.Event().wait()\n" + END,
        "tear-down",
        "the uninterrupted run hung in tear-down, after step 9 of 9: over 5 s",
        ("[losses]", "end_limit_seconds = 5\n[losses]"),
    ),
    Plant(
        "leaves a process behind",
        END,
        "\n    import subprocess\n\n"
        "    subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + END,
        "leftovers",
        "the uninterrupted run left behind",
    ),
    Plant(
        "adapter saved empty",
        "    model.train()\n",
        "    from peft import LoraConfig, PeftModel, get_peft_model\n"
        "    lora = LoraConfig(target_modules=['q_proj'], task_type='CAUSAL_LM')\n"
        "    base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)\n"
        "    model = PeftModel.from_pretrained(base, resumed, is_trainable=True) if resumed"
        " else get_peft_model(base, lora)\n"
        "    save_trained = model.save_pretrained\n"
        "    model.save_pretrained = lambda folder: save_trained(folder, state_dict={})\n"
        "    model.train()\n",
        "checkpoint",
        "lacks 8 of 8 tensors of its adapter",
        ('folder = "{output}/step-{step}"', 'folder = "{output}/step-{step}"\nkind = "adapter"'),
    ),
)


def replaced(text: str, before: str, after: str) -> str:
    assert text.count(before) == 1, before
    return text.replace(before, after)


def judge(folder: Path, plant: Plant) -> Verdict:
    script = (EXAMPLE / "train.py").read_text(encoding="utf-8")
    keys = (EXAMPLE / "smoke.toml").read_text(encoding="utf-8")
    if plant.keys[0]:
        keys = replaced(keys, *plant.keys)
    if 'kind = "adapter"' in keys:
        keys = replaced(keys, 'frozen = ["model.embed_tokens.*"]\n', "")
        keys = replaced(keys, '    "--freeze", "model.embed_tokens",\n', "")
    (folder / "train.py").write_text(replaced(script, plant.line, plant.fault), encoding="utf-8")
    (folder / "smoke.toml").write_text(keys, encoding="utf-8")
    results = folder / "results"
    results.mkdir()
    return run_external(folder / "smoke.toml", results, SilentProgress())


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name.replace(" ", "-"))
def test_planted_script_fails_at_its_level(plant: Plant, tmp_path: Path) -> None:
    verdict = judge(tmp_path, plant)

    assert verdict.verdict is Outcome.FAIL
    failed = {name: one for name, one in verdict.levels.items() if one.verdict is Outcome.FAIL}
    assert next(iter(failed)) == plant.level, {n: level.reason for n, level in failed.items()}
    assert plant.says in str(failed[plant.level].reason)
