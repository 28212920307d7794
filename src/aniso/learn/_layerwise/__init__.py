"""Passes through a network one layer after another, as calibration of features needs them."""
