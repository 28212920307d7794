"""A training step on a device waits for few numbers: one copy of the coefficients, the losses, the gradient.

The device is torch's meta device (``fake_gpu``): nothing here was measured on a GPU.
"""

from __future__ import annotations

from collections import OrderedDict

import colours
import fake_gpu
import naive
import pytest
import tiny
import torch
from fake_gpu import DEVICE
from torch import nn

from aniso.compose import Composition, Partition, Runtime
from aniso.learn import CrossEntropy, Schedule, Trainable
from aniso.learn._training.forward import slices
from aniso.learn._training.loop import Loop
from aniso.learn.keep import Last
from aniso.vectors import Bank, BlockSource, Dense, LowRank, Packed, SparseRows
from aniso.weights import TensorMap

TOKENS, WIDTH = 300, 101
STORAGES = ("fp32", "fp16", "bf16", "int8", "int4", "residual4")
PARTITIONS = ("blocks", "whole", "rows", "columns", "random:7")
RESIDENT, STREAMED = Runtime(memory="1GiB"), Runtime(memory="1GiB", stream=True)


def model():
    torch.manual_seed(0)
    words = nn.Sequential(OrderedDict(word_embeddings=nn.Embedding(TOKENS, WIDTH)))
    layers = {"one": nn.Linear(WIDTH, 57), "act": nn.GELU(), "two": nn.Linear(57, WIDTH)}
    last = {"three": nn.Linear(WIDTH, 57), "four": nn.Linear(57, WIDTH)}
    return nn.Sequential(OrderedDict(embeddings=words, **layers, **last))


def sources():
    base = {name: value.float() for name, value in model().state_dict().items()}
    tuned = {f"v{i}": tiny.tuned(base, seed=i + 1) for i in range(3)}
    for i, one in enumerate(tuned.values()):  # the embedding of a few tokens only
        rows = torch.arange(TOKENS) % 10 != i
        one["embeddings.word_embeddings.weight"][rows] = base["embeddings.word_embeddings.weight"][rows]
    return TensorMap(base), {name: TensorMap(one) for name, one in tuned.items()}


@pytest.fixture(scope="module")
def banks(tmp_path_factory):
    place = tmp_path_factory.mktemp("banks")
    bank = Bank.build(*sources())
    return {storage: bank.save(place / storage, storage=storage) for storage in STORAGES}


def waits_of_a_step(composition, x):
    """What a step waits for once everything is in place, by line of code; and copies to the device."""
    optimiser = torch.optim.AdamW(composition.parameters())
    with fake_gpu.fake_gpu() as waits:
        composition.to(DEVICE)
        x = x.to(DEVICE)
        for _ in range(3):
            waits.clear()
            optimiser.zero_grad()
            composition(x).square().sum().backward()
            optimiser.step()
    assert composition.values.grad.device == DEVICE
    return waits


@pytest.mark.parametrize("runtime", [RESIDENT, STREAMED], ids=["resident", "streamed"])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_of_a_composition_reads_the_coefficients_once(storage, partition, runtime, banks):
    composition = Composition(model(), banks[storage], Partition.parse(partition), runtime=runtime)
    waits = waits_of_a_step(composition, torch.arange(8))
    assert sum(waits.reads.values()) == 1, waits.reads
    if runtime is RESIDENT:
        assert not waits.copies, waits.copies


def kinds(bank, block):
    return {type(delta) for delta in bank.read_block(block, exact=False).values()}


def test_these_banks_have_every_kind_of_delta(banks):
    for storage, bank in banks.items():
        is_packed = storage.startswith(("int", "residual"))
        assert kinds(bank, "one.weight") == {Packed if is_packed else Dense}
        assert kinds(bank, "embeddings.word_embeddings.weight") == {SparseRows}


@pytest.mark.parametrize("memory", ["1GiB", "100kB"], ids=["kept", "recomputed"])
@pytest.mark.parametrize("partition", ["blocks", "random:7"])
@pytest.mark.parametrize("tokens", [2, 4000], ids=["few", "many"])
def test_so_does_one_of_low_rank_vectors(partition, memory, tokens, tmp_path):
    base, ranks = sources()[0], dict.fromkeys(("one.weight", "two.weight", "three.weight", "four.weight"), 4)
    blocks = BlockSource(base)
    bank = Bank({f"v{i}": naive.low_rank(blocks, ranks, seed=i, name=f"v{i}") for i in range(3)})
    bank = bank.save(tmp_path / "bank")
    assert {type(d) for d in bank.read_block("one.weight", exact=False).values()} == {LowRank}
    composition = Composition(model(), bank, Partition.parse(partition), runtime=Runtime(memory=memory))
    assert bool(composition.plan.recomputed) == (memory != "1GiB")
    waits = waits_of_a_step(composition, torch.arange(tokens) % TOKENS)
    assert sum(waits.reads.values()) == 1 and not waits.copies, (waits.reads, waits.copies)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_step_of_the_loop_reads_losses_and_gradient_once_more(world, micro_batch):
    schedule = Schedule(epochs=1, lr=0.1, batch_size=8, micro_batch=micro_batch, restarts=1)
    objective = CrossEntropy(world.target.train) - 0.1 * CrossEntropy(world.control.train)
    with fake_gpu.fake_gpu() as waits:
        composition = world.composition().to(DEVICE)
        loop = Loop(Trainable.coefficients(composition), objective, schedule, Last())
        steps = loop._sampler.epoch(0)
        loop._take_step(next(steps))  # the first reads vectors and class weights
        loop.step += 1
        waits.clear()
        batches = next(steps)
        loop._take_step(batches)
        steps.close()
    forwards = len(slices(batches, micro_batch))
    assert forwards == (1 if micro_batch is None else 2)
    assert sum(waits.reads.values()) == forwards + 2, waits.reads
