"""What happens in a run: hooks on modules, caches, operations, exact double precision."""
