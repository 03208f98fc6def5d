"""The environments that nox sessions share, and which torch goes into them."""
