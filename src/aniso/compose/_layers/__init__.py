"""Linear layers and attention over composed weights, each with its own backward pass."""
