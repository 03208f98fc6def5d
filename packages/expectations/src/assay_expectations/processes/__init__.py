"""The process that runs models, with its requests and answers."""
