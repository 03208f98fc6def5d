"""The suites, as tests of pytest-benchmark. One environment variable holds their settings."""
