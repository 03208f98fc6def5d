"""`python -m assay.cli`."""

from assay.cli import main

if __name__ == "__main__":
    main()
