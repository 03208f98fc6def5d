"""From a model folder to a model in memory, with its configuration and tokenizer."""
