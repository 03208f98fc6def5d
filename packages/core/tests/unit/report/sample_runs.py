"""Made-up run folders in the format of `assay check generate`, for tests of the reports.

The errors follow what was measured on trained bfloat16 models: replayed error 0.003 in every
stage, accumulated error growing to 0.012, single rows scattering by a factor of up to 20.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from assay.files import file_digest
from assay.runs.results import MEASUREMENTS_FILE, VERDICT_FILE, format_verdict
from assay.verdicts import (
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Unmatched,
    Verdict,
)

LIMIT = 3.0
KL_NOISE = 1e-4
KL_RATIO = 1.2
KL_LIMIT = 10.0
NOISE = 2.8e-3  # replayed relative error of a bfloat16 linear
FAULTY_RATIO = 14.6
CLEAN_RATIO = 1.31
FAULTY_TOKEN = (1, 17)
FAULTY_TOKEN_RATIO = 91.0

_LAYER = (
    "", "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp", "mlp.gate_proj",
    "mlp.up_proj", "mlp.act_fn", "mlp.down_proj",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """The size of a made-up run, and its faulty module (None for a clean run)."""

    num_layers: int = 4
    num_prompts: int = 4
    prompt_length: int = 24
    num_new_tokens: int = 8
    faulty_module: str | None = "model.layers.2.mlp.down_proj"
    seed: int = 0

    @property
    def modules(self) -> list[str]:
        """Module paths in the order of the forward pass."""
        layers = [
            f"model.layers.{layer}.{name}".rstrip(".")
            for layer in range(self.num_layers)
            for name in _LAYER
        ]
        return ["", "model", "model.embed_tokens", "model.rotary_emb", *layers, "model.norm",
                "lm_head"]  # fmt: skip

    @property
    def positions(self) -> range:
        """Positions of a prompt and its continuation."""
        return range(self.prompt_length + self.num_new_tokens)

    def step_of(self, position: int) -> int:
        """The forward pass that computes `position`: 0 is the prefill."""
        return max(0, position - self.prompt_length + 1)


def write_sample(folder: Path, sample: Sample) -> Path:
    """Writes verdict.json and measurements.jsonl of `sample` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = sample_measurements(sample)
    text = "".join(row.model_dump_json() + "\n" for row in rows)
    (folder / MEASUREMENTS_FILE).write_text(text, encoding="utf-8")
    write_sample_verdict(sample_verdict(sample), folder)
    return folder


def write_sample_verdict(verdict: Verdict, folder: Path) -> None:
    """Writes verdict.json beside the measurements in `folder`, with the digests of both."""
    files = {MEASUREMENTS_FILE: file_digest(folder / MEASUREMENTS_FILE)}
    text = format_verdict(verdict.model_copy(update={"files": files}))
    (folder / VERDICT_FILE).write_text(text, encoding="utf-8")


def sample_measurements(sample: Sample) -> list[Measurement]:
    """Every row of `sample`: stages, tokens by stages, logits, tokens."""
    rng = np.random.default_rng(sample.seed)
    return [*_stage_rows(sample, rng), *_cell_rows(sample, rng), *_logits_rows(sample, rng)]


def sample_verdict(sample: Sample) -> Verdict:
    """The verdict of `sample`."""
    failed = sample.faulty_module is not None
    tokens = sample.num_prompts * len(sample.positions)
    modules = 2 * len(sample.modules)
    levels = {
        "inputs": Level(verdict=Outcome.PASS, compared=3 * (1 + sample.num_new_tokens)),
        "tokens": Level(verdict=Outcome.PASS, compared=sample.num_prompts),
        "logits": Level(verdict=Outcome.PASS, compared=tokens),
        "modules": Level.model_validate({
            "verdict": Outcome.FAIL if failed else Outcome.PASS,
            "compared": modules,
            "limits_origin": "calibrated on 312 clean runs",
        }),
        "sampler": Level(verdict=None, reason="greedy decoding has no sampler"),
    }  # fmt: skip
    location = Location(phase="forward", module=sample.faulty_module) if failed else None
    return Verdict(
        verdict=Outcome.FAIL if failed else Outcome.PASS,
        command=["assay", "check", "generate", "micro:llama", "--reference", "cpu/float32",
                 "--candidate", "cpu/bfloat16"],
        environment={"assay": "0.1.0", "torch": "2.13.0", "threads": 2,
                     "cpu": {"name": "a laptop", "features": ["avx2", "amx_bf16"]}},
        model={"name": "micro:llama", "parameters": 430_000},
        reference={"run": "cpu/float32", "yardstick": "float64"},
        candidate={"run": "cpu/bfloat16", "attention": "sdpa"},
        levels=levels,
        first_bad_token=TokenPosition(prompt=0, position=3, phase="prefill") if failed else None,
        location=location,
        suspects=_suspects(location),
        diagnosis="module-error" if failed else None,
        noise_ratio=FAULTY_RATIO if failed else CLEAN_RATIO,
        limit=LIMIT,
        statistic="replay-tensor",
        resolution=LIMIT * NOISE,
        compared=sum(level.compared for level in levels.values()),
        unmatched=Unmatched(),
    )  # fmt: skip


def _suspects(location: Location | None) -> list[Suspect]:
    if location is None:
        return []
    layer = location.module.rpartition(".")[0] if location.module else ""
    places = {
        location.module: ("replay-tensor", FAULTY_RATIO, LIMIT),
        layer: ("replay-slope", 9.0, 7.0),
        "lm_head": ("replay-bins", 5.2, 5.0),
    }
    return [
        Suspect(
            location=Location(phase="forward", module=module),
            statistic=statistic,
            error=ratio * NOISE,
            noise_ratio=ratio,
            limit=limit,
        )
        for module, (statistic, ratio, limit) in places.items()
    ]


def _stage_rows(sample: Sample, rng: np.random.Generator) -> list[Measurement]:
    rows = []
    excess = 0.0  # added to the accumulated error by the fault; decreases with the depth
    for order, module in enumerate(sample.modules):
        faulty = module == sample.faulty_module
        excess = 0.9 if faulty else 0.95 * excess
        noise, ratio = NOISE * float(rng.uniform(0.8, 1.0)), float(rng.uniform(0.95, 1.25))
        if faulty:
            noise, ratio = NOISE, FAULTY_RATIO
        elif order == 0 and sample.faulty_module is None:
            noise, ratio = NOISE, CLEAN_RATIO
        drift = NOISE + 2e-4 * order
        for statistic, expected, of_noise, limit in (
            ("replay-tensor", noise, ratio, LIMIT),
            ("replay-slope", 3e-6, 32.0 if faulty else 1.0, 7.0),
            ("replay-bins", 2e-5, 17.5 if faulty else 1.0, 5.0),
            ("accumulated", drift, 1 + excess, None),
        ):
            rows.append(
                Measurement(
                    level="modules",
                    module=module,
                    port="output",
                    order=order,
                    statistic=statistic,
                    actual=of_noise * expected,
                    expected=expected,
                    ratio=of_noise,
                    limit=limit,
                )
            )
    return rows


def _cell_rows(sample: Sample, rng: np.random.Generator) -> list[Measurement]:
    shape = (len(sample.modules), sample.num_prompts, len(sample.positions))
    noise = NOISE * np.exp(rng.normal(0, 0.3, shape))
    ratio = np.exp(rng.normal(0, 0.35, shape))
    if sample.faulty_module is not None:
        faulty = sample.modules.index(sample.faulty_module)
        ratio[faulty] *= FAULTY_RATIO
        ratio[faulty] = np.minimum(ratio[faulty], FAULTY_TOKEN_RATIO / 2)
        ratio[(faulty, *FAULTY_TOKEN)] = FAULTY_TOKEN_RATIO
    return [
        Measurement(
            level="modules",
            module=module,
            port="output",
            order=order,
            statistic="token",
            step=sample.step_of(position),
            prompt=prompt,
            position=position,
            actual=float(ratio[order, prompt, position] * noise[order, prompt, position]),
            expected=float(noise[order, prompt, position]),
            ratio=float(ratio[order, prompt, position]),
        )
        for order, module in enumerate(sample.modules)
        for prompt in range(sample.num_prompts)
        for position in sample.positions
    ]


def _logits_rows(sample: Sample, rng: np.random.Generator) -> list[Measurement]:
    rows = [
        Measurement(
            level="logits",
            module="",
            port="logits",
            statistic="logits-kl",
            actual=KL_RATIO * KL_NOISE,
            expected=KL_NOISE,
            ratio=KL_RATIO,
            limit=KL_LIMIT,
        ),
        Measurement(
            level="tokens",
            module="",
            port="tokens",
            statistic="first-difference",
            actual=0.25,
            expected=0.5,
            ratio=0.5,
            limit=6.0,
            prompt=0,
            position=sample.prompt_length,
        ),
    ]
    for prompt in range(sample.num_prompts):
        for position in sample.positions:
            noise = KL_NOISE * float(np.exp(rng.normal(0, 0.8)))
            ratio = KL_RATIO * float(np.exp(rng.normal(0, 0.25)))
            rows += [
                Measurement(
                    level="logits",
                    module="",
                    port="logits",
                    step=sample.step_of(position),
                    statistic=statistic,
                    prompt=prompt,
                    position=position,
                    actual=actual,
                    expected=expected,
                    ratio=of_noise,
                )
                for statistic, actual, expected, of_noise in (
                    ("kl", ratio * noise, noise, ratio),
                    ("top1-agreement", 1.0, 1.0, math.nan),
                )
            ]
    return rows


def write_hostile_sample(folder: Path, text: str) -> Path:
    """A failed run in which every free text is `text`."""
    sample = Sample(num_layers=1, faulty_module="model.layers.0.mlp.down_proj")
    write_sample(folder, sample)
    for name in (VERDICT_FILE, MEASUREMENTS_FILE):
        path = folder / name
        replaced = path.read_text(encoding="utf-8")
        for known in ("model.layers.0.mlp.down_proj", "micro:llama", "a laptop", "logits-kl"):
            replaced = replaced.replace(json.dumps(known), json.dumps(text))
        path.write_text(replaced, encoding="utf-8")
    verdict = json.loads((folder / VERDICT_FILE).read_text(encoding="utf-8"))
    del verdict["digest"]
    write_sample_verdict(Verdict.model_validate(verdict), folder)
    return folder
