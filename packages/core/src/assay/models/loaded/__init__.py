"""What is in memory after loading, beside what the files of a model folder say."""
