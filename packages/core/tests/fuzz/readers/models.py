"""Readers of model folders, prompts, limits and generation settings."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from assay.api.options import choose_sampling, read_generation_config
from assay.inputs.batches import ModelLimits, load_prompts
from assay.judge.limits import (
    PUBLISHED_METRICS,
    load_limits,
    read_clean_tokens,
    thresholds_file,
)
from assay.models.inspect.inspection import inspect_load
from assay.models.load import load_model
from assay.models.sources import resolve_model
from assay.models.stored_tensors import map_folder, pickled_weights
from assay.models.transformers_calls import quiet_transformers
from assay.models.weight_files import read_tensors, stored_weights
from packages.core.tests.fuzz.reader import Reader
from packages.core.tests.unit.models.inspect.test_inspection import WITH_BOS, tokenizer_with
from packages.core.tests.unit.report.sample_runs import Sample, write_sample


def _write_model(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_transformers():
        LlamaForCausalLM(config).save_pretrained(folder)


def _write_model_with_tokenizer(folder: Path) -> None:
    _write_model(folder)
    tokenizer_with("<s> $A", WITH_BOS).save_pretrained(folder)


def _write_shards(folder: Path) -> None:
    _write_model(folder)
    with quiet_transformers():
        LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="1KB")
    (folder / "model.safetensors").unlink(missing_ok=True)


def _write_pickled(folder: Path) -> None:
    _write_model(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _read_files(folder: Path) -> object:
    """Read a model folder as `assay compare` and the hashes of goldens do, without loading it."""
    source = resolve_model(str(folder))
    assert source.folder is not None
    tensors = read_tensors(source.folder)
    hashed = pickled_weights(folder) if tensors is None else stored_weights(tensors)
    return hashed, {name: value.double().sum().item() for name, value in map_folder(folder).items()}


def _load(folder: Path) -> object:
    """Load and compare as `assay check load` does."""
    torch.set_num_threads(1)
    resolve_model(str(folder))
    return inspect_load(load_model(str(folder), dtype="float32"), "refuse").report


def _write_prompts(folder: Path) -> None:
    lines = [{"text": "a text"}, {"prompt": "another"}, {"ids": [1, 2, 3]},
             {"messages": [{"role": "user", "content": "c"}]}]  # fmt: skip
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read_prompts(folder: Path) -> object:
    limits = ModelLimits(vocab_size=300, max_positions=1_024)
    return load_prompts(
        folder / "prompts.jsonl",
        lambda text: list(text.encode()),
        limits,
        max_new_tokens=4,
        encode_chat=lambda messages: [len(one["content"]) % 300 for one in messages],
    )


def _write_limits(folder: Path) -> None:
    shipped = Path(load_limits.__code__.co_filename).with_name("named_limits") / "noise.toml"
    (folder / "limits.toml").write_text(shipped.read_text())


def _read_limits(folder: Path) -> object:
    limits = load_limits(str(folder / "limits.toml"))
    return limits.of("replay-tensor"), limits.of("logits-kl")


def _write_generation_config(folder: Path) -> None:
    config = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "eos_token_id": 2,
              "repetition_penalty": 1.1, "bad_words_ids": [[1, 2]], "num_beams": 1,
              "cache_implementation": None}  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(config))


def _read_generation_config(folder: Path) -> object:
    options = read_generation_config(folder / "generation_config.json")
    return choose_sampling(options, {"temperature": 0.5})


def _write_clean_runs(folder: Path) -> None:
    for seed in (0, 1):
        write_sample(folder / str(seed), Sample(num_layers=1, faulty_module=None, seed=seed))
        file = folder / str(seed) / "measurements.jsonl"
        rows = [json.loads(line) for line in file.read_text().split("\n")[:8]]
        for number, row in enumerate(rows):
            row["statistic"] = PUBLISHED_METRICS[number % len(PUBLISHED_METRICS)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _calibrate_thresholds(folder: Path) -> object:
    runs = [read_clean_tokens(folder / seed / "measurements.jsonl") for seed in ("0", "1")]
    return thresholds_file(runs, "assay calibrate")


READERS = (
    Reader("model-folder", _write_model, _read_files),
    Reader("model-folder-sharded", _write_shards, _read_files),
    Reader("model-folder-pickled", _write_pickled, _read_files),
    Reader("model-loaded", _write_model_with_tokenizer, _load),
    Reader("model-loaded-pickled", _write_pickled, _load, mutated=("*.bin",)),
    Reader("prompts", _write_prompts, _read_prompts),
    Reader("limits", _write_limits, _read_limits),
    Reader("generation-config", _write_generation_config, _read_generation_config),
    Reader("clean-tokens", _write_clean_runs, _calibrate_thresholds, mutated=("**/*.jsonl",)),
)
