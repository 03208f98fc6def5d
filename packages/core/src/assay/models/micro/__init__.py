"""Small trained models that ship with the package: recipes, weights, random variants."""
