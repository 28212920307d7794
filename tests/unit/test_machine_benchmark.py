"""The benchmark of a machine measures every storage, and says what was measured."""

from __future__ import annotations

import json

import torch

from aniso.compose import machine_benchmark
from aniso.compose.machine_benchmark import STORAGES, benchmark_machine


def test_every_storage_is_measured_beside_the_floor():
    told: list[str] = []
    found = benchmark_machine(
        torch.device("cpu"), lambda what, done, total: told.append(what), width=32, vectors=3, rounds=2
    )
    assert found.vectors == 3 and found.device == "cpu" and found.threads == torch.get_num_threads()
    assert found.parameters == sum(p.numel() for p in machine_benchmark._layers(32).parameters())
    assert found.floor > 0 and found.read_bandwidth > 0
    assert [cost.storage for cost in found.storages] == list(STORAGES)
    assert all(cost.step > 0 and cost.ratio > 0 for cost in found.storages)
    sizes = [cost.bytes_per_step for cost in found.storages]
    assert sizes[0] == 3 * 4 * found.parameters and sizes == sorted(sizes, reverse=True)
    assert {"random vectors", "rounds"} <= set(told)


def test_doctor_prints_it_and_gives_it_to_programs(aniso, monkeypatch):
    small = benchmark_machine(torch.device("cpu"), lambda *_: None, width=32, vectors=2, rounds=1)
    monkeypatch.setattr(machine_benchmark, "benchmark_machine", lambda *_: small)
    ran = aniso("doctor", "--bench", "--device", "cpu")
    assert ran.code == 0 and "step / floor" in ran.out and "int4" in ran.out
    said = json.loads(aniso("doctor", "--bench", "--device", "cpu", "--json").out)["benchmark"]
    assert [cost["storage"] for cost in said["storages"]] == list(STORAGES)
    refused = aniso("doctor", "--bench", "--device", "nowhere")
    assert refused.code == 2 and "nowhere" in refused.err
