"""Python on a machine that has devices of every maker: `python machine.py -m MODULE ARGUMENT...`."""

import runpy
import sys

from torch_builds import install  # type: ignore[import-not-found] # beside it on the path

_, _, module, *arguments = sys.argv
sys.argv = [module, *arguments]
install(setattr)
runpy.run_module(module, run_name="__main__", alter_sys=True)
