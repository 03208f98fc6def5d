"""The process that runs models, and what it is asked."""
