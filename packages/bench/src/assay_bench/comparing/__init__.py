"""Is a model as good as another one? Imports neither torch nor lm-eval."""
