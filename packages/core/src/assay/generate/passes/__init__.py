"""Running a model over batches: free, teacher-forced, recorded, replayed."""
