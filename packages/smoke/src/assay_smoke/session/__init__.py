"""Sessions of many cases: plan, runs, retries, results and page."""
