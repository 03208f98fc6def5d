"""Support for tests of models. Importing this package does not import torch."""
