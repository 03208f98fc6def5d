"""One case of the matrix from set-up to tear-down: what its processes do, and how it is judged.

A case is up to five worlds of ranks, one after the other. `train` runs set-up, steps, checkpoint,
steps and tear-down, and resumes in the same process; `terminate`, where the case asks for it, is
sent SIGTERM in the middle of a step; `resume` goes on from the checkpoint in new processes;
`restart` starts another run from a saved model; `read` loads what the run left as its users would,
with plain transformers and peft.
"""
