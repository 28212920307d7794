"""Vectors and banks on disk."""
