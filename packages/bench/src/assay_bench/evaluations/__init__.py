"""What an evaluation by lm-eval gave, item by item, whoever ran it. Imports neither torch nor lm-eval."""
