"""`assay check load`: is what is in memory what the files of a model folder say?"""
