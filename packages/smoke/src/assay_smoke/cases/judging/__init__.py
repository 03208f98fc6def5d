"""From what the worlds of a case answered to one verdict, level by level."""
