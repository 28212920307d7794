"""A fuzzer for everything that reads other people's files: ``python -m tests.fuzz --help``."""
