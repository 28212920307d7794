"""What test_triton.py runs in a process of its own: Triton's interpreter must be chosen before the import.

Every check prints one line of JSON: its name and its largest error, relative to the size of the result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if sys.argv[1] != "compiled":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import tiny
import torch
from torch import Tensor

from aniso import Bank, Composition, Partition, Runtime
from aniso.compose._kernels import dispatch, triton_gpu
from aniso.vectors.packing import Packing, pack, unpack
from aniso.weights import TensorMap

SIZES = (1, 64, 127, 128, 1025, 3000)
FORMS = (torch.float32, torch.bfloat16, torch.float16, Packing(8), Packing(4), Packing(2))
VARIANTS = (("blocks", False), ("whole", True), ("rows", False), ("random:7", True))
STORAGES = ("fp32", "fp16", "bf16", "int8", "int4", "residual4", "residual2")


def told(name: str, found: Tensor, exact: Tensor, size: Tensor | float) -> None:
    error = float(((found.double() - exact).abs() / size).max()) if exact.numel() else 0.0
    print(json.dumps({"name": name, "error": error, "shape": list(found.shape) == list(exact.shape)}))


def kernel(form: torch.dtype | Packing, rows: int, size: int) -> None:
    """The kernel alone, against double precision: beside, in place, without a base, and products."""
    g = torch.Generator().manual_seed(size)
    numbers = torch.randn(rows, size, generator=g)
    packing, scales = None, None
    if isinstance(form, Packing):
        packing, packed = form, [pack(row, form) for row in numbers]
        stored, scales = (torch.stack(own) for own in zip(*packed, strict=True))
        exact = torch.stack([unpack(*own, form, size) for own in packed]).double()
    else:
        stored = numbers.to(form)
        exact = stored.double()
    base, gradient = torch.randn(2, size, generator=g)
    coefficients = torch.randn(rows, generator=g)
    summed = coefficients.double() @ exact
    name, largest = f"{form} {rows} x {size}", exact.abs().sum(0).max() + base.abs().max()
    given = (stored, packing, scales)
    out = torch.full((size,), 7.0)
    triton_gpu.run(*given, coefficients=coefficients, out=out)
    told(f"{name} without a base", out, summed, largest)
    triton_gpu.run(*given, coefficients=coefficients, base=base, out=out)
    told(f"{name} with a base", out, base + summed, largest)
    again = base.clone()
    products = triton_gpu.run(*given, coefficients=coefficients, base=again, out=again, gradient=gradient)
    assert torch.equal(again, out)  # in place, the very same
    told(
        f"{name} products",
        products,
        (exact @ gradient.double())[:, None],
        exact.norm(dim=1).max() * gradient.norm(),
    )
    assert torch.equal(triton_gpu.run(*given, gradient=gradient), products)
    zeros = torch.tensor([0.0, -0.0, 1.5])[torch.arange(size) % 3]
    triton_gpu.run(*given, coefficients=torch.zeros(rows), base=zeros, out=out)
    assert torch.equal(out.view(torch.int32), zeros.view(torch.int32))  # also the sign of a zero


def compositions(place: Path) -> None:
    """Compositions that use the kernel as they would on a GPU, against plain torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(101, 57), torch.nn.GELU(), torch.nn.Linear(57, 3))
    base = {k: v.float() for k, v in model.state_dict().items()}
    tuned = {f"v{i}": TensorMap(tiny.tuned(base, seed=i + 1)) for i in range(3)}
    bank = Bank.build(TensorMap(base), tuned)
    x = torch.randn(4, 101, generator=torch.Generator().manual_seed(5))
    for storage in STORAGES:
        saved = bank.save(place / storage, storage=storage)
        for partition, stream in VARIANTS:
            found = []
            for fast in (True, False):
                calls.clear()
                runtime = Runtime(fast=fast, stream=stream)
                one = Composition(model, saved, Partition.parse(partition), runtime=runtime)
                with torch.no_grad():
                    one.values.copy_(torch.linspace(-1, 1, len(one.values)))
                loss = one(x).square().sum()
                loss.backward()
                found.append([*one.weights().values(), one.values.grad])
                packed = storage != "fp32" and partition in ("blocks", "whole")
                assert bool(calls) == (fast and packed), (storage, partition, len(calls))
            for i, (a, b) in enumerate(zip(*found, strict=True)):
                told(f"{storage} {partition} {stream} {i}", a, b.double(), b.abs().max() + 1e-9)


calls: list[int] = []


def as_on_a_gpu() -> None:
    """Make tensors of this CPU take the way of tensors on a GPU: Triton here, never numba."""
    run = triton_gpu.run

    class Counted:
        @staticmethod
        def run(*args: object, **kwargs: object) -> object:
            calls.append(1)
            return run(*args, **kwargs)

    dispatch.compiler = lambda device: "triton"
    dispatch._gpu_kernels = lambda: Counted
    assert dispatch.gpu_kernel_works(torch.device("cpu"))
    dispatch._is_on_gpu = lambda stored: True


def broken() -> None:
    """A kernel that is wrong, or does not compile, is noticed and left out."""
    import warnings

    def fails(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C compiler")

    def wrong(*args: object, **kwargs: object) -> object:
        return triton_gpu.run(*args, **kwargs) * 1.1

    for run, words in ((fails, "no C compiler"), (wrong, "is wrong by")):
        dispatch._gpu_kernels = lambda run=run: type("Broken", (), {"run": staticmethod(run)})
        dispatch.gpu_kernel_works.cache_clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert not dispatch.gpu_kernel_works(torch.device("cpu"))
        assert words in str(seen[0].message), seen


def compiled() -> None:
    """Compile every variant for an A100 and an H100, which needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile  # noqa: A004

    pointers = {"out": "*fp32", "base": "*fp32", "coefficients": "*fp32", "gradient": "*fp32"}
    pointers |= {"sums": "*fp32", "scales": "*bf16"}
    for capability in (80, 90):
        for bits, stored in ((0, "*fp16"), (0, "*bf16"), (8, "*u8"), (4, "*u8"), (2, "*u8")):
            for work in (("out", "coefficients"), ("out", "coefficients", "base"), ("gradient", "sums")):
                given = {*work, "scales"} if bits else {*work}
                constants = {name: None for name in pointers if name not in given}
                constants |= {"bits": bits, "middle": Packing(bits).middle if bits else 0.0, "group": 64}
                constants |= {"adds": "out" in work, "has_base": "base" in work, "size": triton_gpu.PIECE}
                constants |= {"multiplies": "gradient" in work}
                sizes = dict.fromkeys(("numel", "rows", "stored_step", "scales_step"), "i32")
                types = dict.fromkeys(constants, "constexpr") | {name: pointers[name] for name in given}
                source = ASTSource(triton_gpu.stack_kernel, {**types, **sizes, "stored": stored}, constants)
                options = {"num_warps": 4, "enable_fp_fusion": True}
                made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                print(
                    json.dumps(
                        {"name": f"{capability} {bits} {stored} {work}", "cubin": len(made.asm["cubin"])}
                    )
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "kernel":
        for form in FORMS:
            for rows in (1, 5):
                for size in SIZES:
                    kernel(form, rows, size)
    elif sys.argv[1] == "compositions":
        as_on_a_gpu()
        compositions(Path(sys.argv[2]))
    elif sys.argv[1] == "compiled":
        compiled()
    else:
        broken()
