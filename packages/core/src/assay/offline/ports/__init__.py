"""The ports of modules, and their partners in another dump."""
