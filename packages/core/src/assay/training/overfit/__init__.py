"""`assay check train --overfit`: checks if a trainer memorizes a few sequences."""
