"""From messages to ids and labels."""
