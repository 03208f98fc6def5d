"""From measurements to one verdict."""
