"""Loading a model folder: model, configuration and tokenizer."""
