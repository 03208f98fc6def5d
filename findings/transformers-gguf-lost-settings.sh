#!/usr/bin/env bash
# transformers 5.23.0 reads the configuration of a GGUF file without three settings that the file states.
#
# The metadata of GGUF have keys for Gemma 2's caps of attention scores and logits, and for the width of a head
# (`attention.key_length`), which Qwen 3 does not derive from its other sizes. `AutoConfig.from_pretrained` with
# `gguf_file` returns the defaults of the class instead, without a warning: a model with other caps computes other
# logits. The file's own epsilon is read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0

HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$folder/env/bin/python" - "$folder" <<'PYTHON' | tee "$folder/seen"
import sys
from pathlib import Path

import numpy as np
import transformers
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig

print("transformers", transformers.__version__)
folder = Path(sys.argv[1])


def write(name, settings):
    writer = GGUFWriter(folder / f"{name}.gguf", name)
    writer.add_vocab_size(32)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    settings(writer)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def show(name, key, attribute):
    stated = GGUFReader(folder / f"{name}.gguf").get_field(f"{name}.{key}").contents()
    config = AutoConfig.from_pretrained(folder, gguf_file=f"{name}.gguf")
    print(f"{name}.{key} is {stated} in the file, {attribute} is {getattr(config, attribute)}")


def cap(writer):
    writer.add_attn_logit_softcapping(20.0)
    writer.add_final_logit_softcapping(10.0)


write("gemma2", cap)
write("qwen3", lambda writer: writer.add_key_length(48))
show("gemma2", "attn_logit_softcapping", "attn_logit_softcapping")
show("gemma2", "final_logit_softcapping", "final_logit_softcapping")
show("gemma2", "attention.layer_norm_rms_epsilon", "rms_norm_eps")
show("qwen3", "attention.key_length", "head_dim")
PYTHON

diff "$folder/seen" - <<'SEEN'
transformers 5.23.0
gemma2.attn_logit_softcapping is 20.0 in the file, attn_logit_softcapping is 50.0
gemma2.final_logit_softcapping is 10.0 in the file, final_logit_softcapping is 30.0
gemma2.attention.layer_norm_rms_epsilon is 9.999999747378752e-06 in the file, rms_norm_eps is 9.999999747378752e-06
qwen3.attention.key_length is 48 in the file, head_dim is 128
SEEN
