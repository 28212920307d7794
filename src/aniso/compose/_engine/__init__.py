"""How composed weights are computed, kept in memory and put into a model's modules."""
