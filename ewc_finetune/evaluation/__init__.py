"""How well a model does, and how much it has kept."""
