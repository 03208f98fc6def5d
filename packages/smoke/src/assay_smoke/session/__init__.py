"""Many cases, one after the other or side by side: results, retries, page."""
