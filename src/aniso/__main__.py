"""``python -m aniso``."""

from aniso.cli import entry

if __name__ == "__main__":
    entry()
