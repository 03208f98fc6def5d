"""Rules for the committed workflows that no general linter has."""
