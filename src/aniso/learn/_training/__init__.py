"""The training loop and what belongs to it; other rooms use ``aniso.learn``."""
