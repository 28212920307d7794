"""Make src/aniso/demo/digits.png: the first hundred of each of scikit-learn's handwritten digits.

    pip install scikit-learn && python scripts/demo_digits.py

Row n holds the digits n, each eight pixels wide, white on black.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

EACH = 100


def main() -> None:
    digits = load_digits()
    rows = [
        np.concatenate(list(digits.images[digits.target == n][:EACH]), axis=1) for n in range(10)
    ]  # 16 grey levels
    sheet = np.concatenate(rows) * 255 / 16
    place = Path(__file__).parents[1] / "src" / "aniso" / "demo" / "digits.png"
    Image.fromarray(sheet.round().astype(np.uint8)).save(place, optimize=True)


if __name__ == "__main__":
    main()
