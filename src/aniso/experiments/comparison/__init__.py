"""Comparison of methods on one task: which is best on data that were held out, and is it worth its cost?"""
