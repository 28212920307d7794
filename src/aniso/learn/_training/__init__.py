"""The training loop and its parts; other packages import from ``aniso.learn``."""
