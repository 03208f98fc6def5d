"""The rules, a file for each subject, and the vocabulary."""
