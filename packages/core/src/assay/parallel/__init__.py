"""Building blocks of parallel training: weights or layers divided over ranks.

Built on DTensor, FSDP2, torch.distributed.pipelining and torch.distributed.checkpoint.
Importing this package imports no torch.
"""
