"""From what was seen of a training library's runs to a verdict."""
