#!/usr/bin/env bash
# bitsandbytes 0.50.2 cannot run 4-bit layers on a CPU with AVX512-BF16 unless whole blocks fill a row.
#
# A block of 64 values may cross the end of a row. The first call in evaluation mode repacks the weight for the CPU and
# takes a whole number of blocks for each row, so a layer with 96 inputs raises an error. The same layer runs in training
# mode, which does not repack. Repacking also fails if the number of outputs is not a multiple of 32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet bitsandbytes==0.50.2

"$folder/env/bin/python" - <<'PYTHON' 2>/dev/null | tee "$folder/seen"
import sys

import torch
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit

if not has_avx512bf16():
    sys.exit("this CPU has no AVX512-BF16")
for inputs, outputs in ((128, 64), (96, 64), (128, 48)):
    for is_training in (True, False):
        layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer = layer.to("cpu").train(is_training)
        try:
            with torch.no_grad():
                layer(torch.ones(1, inputs, dtype=torch.bfloat16))
            outcome = "runs"
        except (RuntimeError, AssertionError) as error:
            outcome = f"raises {type(error).__name__}"
        mode = "training" if is_training else "evaluation"
        print(f"{inputs} inputs, {outputs} outputs, {mode}: {outcome}")
PYTHON

diff "$folder/seen" - <<'SEEN'
128 inputs, 64 outputs, training: runs
128 inputs, 64 outputs, evaluation: runs
96 inputs, 64 outputs, training: runs
96 inputs, 64 outputs, evaluation: raises RuntimeError
128 inputs, 48 outputs, training: runs
128 inputs, 48 outputs, evaluation: raises AssertionError
SEEN
