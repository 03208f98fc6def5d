"""The process of test_crash.py: writes calls until it is killed, and prints each flush."""

import sys

import torch

from assay.sites import Call, CallSite
from assay.trace import TraceWriter


def main() -> None:
    writer = TraceWriter(sys.argv[1], {"endless": True})
    step = 0
    while True:
        for order in range(4):
            site = CallSite(step, f"m{order}")
            values = torch.full((4096,), float(4 * step + order))
            writer.add(Call(site, "Linear", None, 4 * step + order), {"output": values})
        writer.flush()
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        step += 1


main()
