"""What the lock runs: parts of the corpora, and whole commands."""

FAULTS = "packages/core/tests/faults"
FALSE_ALARMS = "packages/core/tests/false_alarms"

# Arguments of pytest. Each takes at most 20 minutes of two cores.
CORPORA: dict[str, tuple[str, ...]] = {
    "generation-float32": (FAULTS, "--corpus", "generation", "--fault", "float32"),
    "generation-bfloat16": (FAULTS, "--corpus", "generation", "--fault", "bfloat16"),
    "training-float32": (FAULTS, "--corpus", "training", "--training-fault", "float32"),
    "training-bfloat16": (FAULTS, "--corpus", "training", "--training-fault", "bfloat16"),
    "published": (FAULTS, "--corpus", "published"),
    "offline": (FAULTS, "--corpus", "offline", "--fault", "mixtral float32"),
    "foreign": (FAULTS, "--corpus", "foreign"),
    "foreign-clean": (FALSE_ALARMS, "--corpus", "foreign"),
    "clean-generation": (FALSE_ALARMS, "--corpus", "generation", "--part", "1/8"),
    "clean-training": (FALSE_ALARMS, "--corpus", "training", "--part", "1/8"),
    "clean-offline": (FALSE_ALARMS, "--corpus", "offline", "--variant", "llama bfloat16"),
}

_TRAINER = "packages/core/tests/false_alarms/minimal_trainers.py:Plain"
_CHECK = ("--reference", "cpu/float32", "--candidate", "cpu/bfloat16")
_PLANT = "packages/core/tests/faults/plants/layers.py:other_gelu"
# Arguments of assay. A command reads what those before it wrote below {}.
COMMANDS: dict[str, tuple[str, ...]] = {
    "load": ("check", "load", "micro:llama"),
    "generate": ("check", "generate", "micro:llama", *_CHECK, "--keep", "full"),
    "generate-fault": ("check", "generate", "micro:llama", *_CHECK, "--candidate-setup", _PLANT),
    "train": ("check", "train", "micro:llama", *_CHECK, "--lora"),
    "train-ranks": ("check", "train", "micro:llama", *_CHECK, "--mesh", "dp=2"),
    "train-own": ("check", "train", "micro:llama", *_CHECK, "--candidate-trainer", _TRAINER),
    "overfit": ("check", "train", "micro:llama", *_CHECK, "--overfit"),
    "capture": ("capture", "micro:llama", "--run", "cpu/float32"),
    "compare": ("compare", "{}/generate/golden", "{}/capture"),
    "smoke": ("smoke", "run", "one-process-1", "fsdp-2-bfloat16-lora-merged"),
    "smoke-command": ("smoke", "run", "command:examples/plain_training/smoke.toml"),
    "smoke-data": ("smoke", "data"),
    "expect": ("expect", "capture", "micro:llama", "--run", "cpu/float32"),
    "verify": ("expect", "verify", "{}/expect", "--run", "cpu/float32"),
    "bench": ("bench", "run", "--model", "micro:llama", "--run", "cpu/float32"),
    "bench-compare": ("bench", "compare", "{}/bench", "{}/bench"),
}
