"""Compare a loaded model with the files of its folder."""
