"""Language-model evaluations and performance benchmarks, and the judgement of regressions."""
