"""A bank spread over two processes gives what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from aniso import Bank, Composition, Partition, Runtime
from aniso.weights import TensorMap

sys.path.insert(0, str(Path(__file__).parent))
import sharded_worker


def _bank(path: Path, storage: str) -> Bank:
    base = {k: v.float() for k, v in sharded_worker.encoder().state_dict().items()}
    tuned = {f"v{i}": TensorMap(tiny.tuned(base, seed=i + 1)) for i in range(3)}
    return Bank.build(TensorMap(base), tuned).save(path, storage=storage)


def _run_processes(world: int, *arguments: str) -> None:
    """Run the worker in several processes over the loopback interface; what one of them says is shown."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, sharded_worker.__file__, str(rank), str(world), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        said = [worker.communicate(timeout=300)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * world, "\n".join(said)


@pytest.mark.parametrize(
    ("storage", "partition", "stream"),
    [
        ("int4", "random:7", "stream"),
        ("residual2", "rows", "resident"),
        ("int8", "blocks", "base"),
        ("fp32", "random:7", "base"),
    ],
)
def test_two_processes_with_half_the_samples_each_agree_with_one(
    tmp_path: Path, storage: str, partition: str, stream: str
) -> None:
    bank = _bank(tmp_path / "bank", storage)
    alone = Composition(sharded_worker.encoder(), bank, Partition.parse(partition))
    expected = sharded_worker.steps(alone, sharded_worker.samples())
    out = tmp_path / "out"
    _run_processes(2, str(tmp_path / "bank"), partition, stream, str(out))
    for rank in range(2):
        found = torch.load(f"{out}.{rank}", weights_only=True)
        memory = found.pop("memory")
        whole = sum(p.nbytes for p in sharded_worker.encoder().parameters())
        assert memory < 0.6 * whole if stream == "base" else memory == whole
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_a_base_is_shared_over_several_processes_only(tmp_path: Path, refused) -> None:
    bank = _bank(tmp_path / "bank", "fp32")
    with refused("USAGE", 2, "--shard-base", "--devices"):
        Composition(sharded_worker.encoder(), bank, runtime=Runtime(shard_base=True))
