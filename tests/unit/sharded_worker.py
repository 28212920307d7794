"""One of the processes of test_sharded.py: compose over a sharded bank, and leave what came out."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny

from aniso import Bank, Composition, Partition, Runtime
from aniso.errors import UsageError

SAMPLES = 4


def encoder() -> torch.nn.Module:
    return tiny.open_clip_vit().visual.double()


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def steps(composition: Composition, mine: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two steps of descent: values, the last gradient, and the outputs that all processes agree on."""
    optimiser = torch.optim.SGD([composition.values], lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        composition(mine).square().mean().backward()
        optimiser.step()
    assert composition.values.grad is not None
    with torch.no_grad():
        outputs = composition(samples())
    with torch.no_grad():
        weights = torch.cat([w.flatten() for w in composition.weights().values()])
    return {
        "weights": weights,
        "values": composition.values.detach(),
        "gradient": composition.values.grad,
        "outputs": outputs,
    }


def base_memory(composition: Composition) -> int:
    """Bytes of the base that this process has: parameters of the copied model, and shares."""
    shared = composition._sharded_base
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in composition.model.parameters()
    }
    return sum(storages.values()) + (sum(s.nbytes for s in shared.shares.values()) if shared else 0)


def refuse_what_needs_the_base(composition: Composition) -> Composition:
    """Baking is refused; moving and copying work; returns a copy that went to 32 bits and back."""
    for call in (composition.bake, lambda: composition.with_bank(composition.bank)):
        try:
            call()
        except UsageError as e:
            assert "share" in str(e)
        else:
            raise AssertionError("it was not refused")
    assert composition._base_copy().state_dict()["conv1.weight"].isnan().all()
    before = base_memory(composition)
    copied = copy.deepcopy(composition.to(torch.float64))
    assert base_memory(copied) == before
    return copied


def main(rank: int, world: int, bank: str, partition: str, stream: str, out: str) -> None:
    torch.set_num_threads(1)
    # A file instead of a port: nothing else on the machine can be in the way.
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runtime = Runtime(stream=stream == "stream", shard_base=stream == "base")
    composition = Composition(
        encoder(), Bank.load(bank), Partition.parse(partition), runtime=runtime, mesh=mesh
    )
    if stream == "base":
        composition = refuse_what_needs_the_base(composition)
    found = steps(composition, samples().chunk(dist.get_world_size())[dist.get_rank()])
    found["memory"] = torch.tensor(base_memory(composition))
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.barrier()  # who leaves early would close the connection that another still reads from
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
