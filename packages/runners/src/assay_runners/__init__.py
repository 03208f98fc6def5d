"""Plans the jobs of GitHub events, and describes the machines that run them."""
