"""What tests of models stand on, with pytest or without. Importing it imports no torch."""
