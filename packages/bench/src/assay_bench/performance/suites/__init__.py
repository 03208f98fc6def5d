"""What is measured, as tests of pytest-benchmark; what is asked of them comes in one variable."""
