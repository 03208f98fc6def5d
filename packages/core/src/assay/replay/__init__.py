"""Location of an error: its stage, and the operation in the stage."""
