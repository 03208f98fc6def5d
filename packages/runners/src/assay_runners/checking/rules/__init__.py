"""What workflows have to keep: a file for each kind of rule, and the two lists beside them."""
