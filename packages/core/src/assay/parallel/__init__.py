"""Building blocks of parallel training: models divided over the ranks of a mesh.

Built on DTensor, FSDP2, torch.distributed.pipelining and torch.distributed.checkpoint.
Importing this package imports no torch.
"""
