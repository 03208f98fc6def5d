"""`assay check train --overfit`: does a trainer memorize a few sequences as the reference does?"""
