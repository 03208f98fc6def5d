"""Stand-in of habana_frameworks."""
