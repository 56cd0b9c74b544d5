"""How a model's outputs become log p(y | x)."""
