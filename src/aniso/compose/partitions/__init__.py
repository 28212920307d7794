"""Partitions, one file each: how a block's elements are divided among coefficients."""
