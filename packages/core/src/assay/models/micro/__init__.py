"""Small trained models that ship with the package: recipes, weights, training, random variants."""
