"""Load a model folder: model, configuration and tokenizer."""
