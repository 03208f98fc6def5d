"""Compile the sums now instead of at their first use."""

from assay.kernel import compiled

if __name__ == "__main__":
    compiled.library()
