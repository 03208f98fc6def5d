"""Short training runs: setup, a few steps, checkpoint, teardown, resume.

`commands` parses the options of `assay smoke`. `session.command` runs the cases that `matrix.rules` chose, and
libraries with a command line:

- A case: `cases.running` launches its worlds of ranks and judges their answers, `cases.worlds` is their work.
- A library: `external.watched_run` makes its runs, `external.levels` and `external.rerun_levels` judge them.

`data.planned_checks` checks code that makes batches, and `data.verdict` judges the reports.
"""
