"""Where cells run: on this machine, on a Ray cluster, or as jobs of SLURM."""

from aniso.experiments.engines.engine import Engine, Happened, Work, make_engine

__all__ = ["Engine", "Happened", "Work", "make_engine"]
