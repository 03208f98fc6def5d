"""One run of a training library: launched, watched, ended."""
