"""The Triton kernel, run by Triton's interpreter on a CPU, gives what plain torch gives.

No test runs it on a GPU; for two of them it is compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch was installed without triton"
)


def rows(*arguments: object, **variables: str) -> list[dict[str, Any]]:
    """Run the worker; returns what it says about each check."""
    worker = Path(__file__).with_name("triton_worker.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, str(worker), *map(str, arguments)]
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def errors(*arguments: object) -> dict[str, float]:
    """Return the error of each check by name."""
    found = rows(*arguments)
    assert all(one["shape"] for one in found)
    return {one["name"]: one["error"] for one in found}


def test_sums_and_products_are_those_of_double_precision_for_every_storage_and_size():
    found = errors("kernel")
    assert len(found) == 6 * 2 * 6 * 3
    assert max(found.values()) < 1e-6, {name: e for name, e in found.items() if e >= 1e-6}


def test_compositions_have_the_weights_and_gradients_of_plain_torch(tmp_path):
    found = errors("compositions", tmp_path)
    assert len({name.rpartition(" ")[0] for name in found}) == 7 * 4
    assert max(found.values()) < 1e-5, {name: e for name, e in found.items() if e >= 1e-5}


def test_a_kernel_that_fails_or_is_wrong_is_left_out_with_a_warning():
    assert errors("broken") == {}


def test_every_variant_compiles_for_an_a100_and_an_h100(tmp_path):
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this triton has no compiler for NVIDIA's GPUs")
    found = rows("compiled", TRITON_CACHE_DIR=str(tmp_path))
    assert len({one["name"] for one in found}) == 2 * 5 * 3 and all(one["cubin"] > 1000 for one in found)
