"""One case of the matrix: the work of its processes and the verdict.

A case runs up to five worlds of ranks in turn. `train` sets up, trains, saves, trains on, tears down
and resumes in the same process. `terminate` gets SIGTERM within a step. `resume` continues from the
checkpoint in new processes. `restart` starts a new run from the saved model. `read` loads the saved
model as users do, with plain transformers and peft.
"""
