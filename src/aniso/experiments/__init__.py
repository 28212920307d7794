"""Experiments are files, results are records."""
