"""How fast a machine runs models: measured, compared between environments, kept and watched."""
