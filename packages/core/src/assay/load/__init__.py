"""`assay check load`: compare a loaded model with the files of its folder."""
