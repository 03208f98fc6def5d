"""TRL's `SFTTrainer`, for `accelerate launch`. Evaluates the model without its wrapper."""

import os
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

PAD, EOS = "<pad>", "<eos>"
WORDS = [PAD, EOS, "the", "cat", "dog", "sees", "hears", "a", "bird", "and", "then", "it", "sleeps"]

set_seed(0)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, PAD)),
    pad_token=PAD,
    eos_token=EOS,
)
tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
config = Qwen2Config(
    vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
model = Qwen2ForCausalLM(config)
if os.environ.get("FAULT"):
    model.model.layers[0].self_attn.o_proj.weight.register_hook(lambda gradient: gradient * 20)
texts = [" ".join(WORDS[2 + (i * j) % 11] for j in range(1, 9)) for i in range(1, 17)]
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder, max_steps=2, per_device_train_batch_size=2, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, bf16=False, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    SFTTrainer(
        model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}),
        eval_dataset=Dataset.from_dict({"text": texts[:4]}), processing_class=tokenizer,
    ).train()  # fmt: skip
