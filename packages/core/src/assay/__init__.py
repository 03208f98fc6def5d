"""assay: does this model train and generate on this accelerator as it does on the reference?"""
