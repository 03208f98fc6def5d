"""`assay check generate`: does a model generate here as it does on the reference?"""
