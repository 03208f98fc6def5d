"""Supervised fine-tuning with TRL, as its users write it, on the documentation of Python.

    accelerate launch --num_processes 1 --cpu train.py --model FOLDER --output runs/sft --lora

smoke.toml beside it describes it to `assay smoke`; so do smoke-lora.toml and smoke-fsdp.toml.
"""

import argparse
import gc
import pydoc_data.topics
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from trl import SFTConfig, SFTTrainer


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--keep", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2, help="of each process")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume-from", help="a checkpoint of an earlier run")
    parser.add_argument("--lora", action="store_true")
    return parser.parse_args()


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, or one whose ids are bytes."""
    if (model / "tokenizer_config.json").is_file():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
        return tokenizer
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    by_bytes = Tokenizer(models.BPE(vocabulary, []))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokenizer = FastTokenizer(tokenizer_object=by_bytes)
    # The ids that follow 255, in this order.
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    return tokenizer


def load_examples() -> Dataset:
    """For every topic of Python's documentation its name, and how it begins."""
    topics = sorted(pydoc_data.topics.topics.items())
    return Dataset.from_list(
        [{"prompt": f"{name}: ", "completion": text[:80]} for name, text in topics]
    )


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),
        args=SFTConfig(
            output_dir=str(arguments.output),
            max_steps=arguments.steps,
            save_steps=arguments.save_every,
            save_total_limit=arguments.keep,
            logging_steps=1,
            per_device_train_batch_size=arguments.batch_size,
            gradient_accumulation_steps=arguments.accumulation,
            learning_rate=1e-3,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            seed=arguments.seed,
        ),
        train_dataset=load_examples(),
        processing_class=load_tokenizer(arguments.model),
        peft_config=lora if arguments.lora else None,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from)
    if distributed.is_initialized():
        # Otherwise gloo's threads may abort a rank at its end.
        del trainer
        gc.collect()
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
