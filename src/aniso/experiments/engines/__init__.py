"""Where cells run: on this machine, on a Ray cluster, or as jobs of SLURM."""

from aniso.experiments.engines.engine import Engine, GridRun, Happened, make_engine

__all__ = ["Engine", "Happened", "GridRun", "make_engine"]
