"""Compare merge rules with mergekit and FusionBench on random vectors, and write the differences.

The packages are no dependencies of aniso. They are installed into a directory of their own, which this script
reads them from:

    python -m pip install --no-deps --target PACKAGES mergekit==0.1.5 fusion-bench==0.2.33 \
        omegaconf antlr4-python3-runtime==4.9.3 bidict hydra-core lightning lightning-utilities \
        torchmetrics datasets multiprocess dill
    python scripts/merge_parity.py --packages PACKAGES --out benchmarks/results/merge_parity.json

A difference is the largest absolute one over the largest absolute value, over all blocks of five vectors in
float64. Rules that a package lacks, or whose module cannot be imported, are listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from aniso.merge import Deltas, MergeRule, new_merge_rule
from aniso.merge.dare_rule import Dare
from aniso.registry import MERGE_RULES

Vector = dict[str, Tensor]
VECTORS = 5
SHAPES = {
    "layers.0.tall.weight": (48, 32),
    "layers.0.wide.weight": (30, 49),
    "layers.1.square.weight": (40, 40),
    "layers.1.bias": (40,),
    "layers.1.norm.weight": (48,),
    "patches.weight": (16, 3, 4, 4),
}
"""Small matrices of every shape, and blocks that are none; ranks that five does not divide, too."""
AGREES = 1e-6
"""Rounding of float32, in which mergekit draws and applies its random masks."""
KEEP, SCALE = 0.3, 0.7
MERGEKIT, FUSION_BENCH = "mergekit", "fusion-bench"


def vectors() -> list[Vector]:
    """Random vectors with values that float32 holds exactly, and some elements that are zero."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for size in (1.0, 1.3, 0.8, 1.1, 0.6):
        own = {n: torch.randn(s, generator=generator) * size * 1e-2 for n, s in SHAPES.items()}
        own["layers.1.bias"][:5] = 0
        made.append({name: values.double() for name, values in own.items()})
    return made


def merged(rule: MergeRule, given: Sequence[Vector]) -> Vector:
    """What a rule of ours makes of vectors, in float64."""
    deltas = {name: Deltas.of([one[name] for one in given], block=name) for name in SHAPES}
    ready = rule.prepared(list(deltas.values()))
    return {
        name: (ready.matrix if len(SHAPES[name]) == 2 else ready.other)(one) * rule.scale
        for name, one in deltas.items()
    }


def difference(ours: Vector, theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference over the largest value."""
    largest = max(float(values.abs().max()) for values in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in SHAPES) / largest


# the other packages


def _module(name: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module(name)


def _mergekit(
    method: str,
    given: Sequence[Vector],
    *,
    weight: float = 1.0,
    density: float = 1.0,
    normalize: bool = False,
    rescale: bool = False,
) -> Vector:
    """What mergekit makes of models whose base is zero, tensor by tensor."""
    base, registry = _module("mergekit.merge_methods.base"), _module("mergekit.merge_methods.registry")
    names = [f"v{i}" for i in range(len(given))]
    values = {
        "weight": base.PerInputValues([(name, weight) for name in names]),
        "density": base.PerInputValues([(name, density) for name in names]),
        "normalize": normalize,
        "rescale": rescale,
        "int8_mask": False,
        "lambda": 1.0,
    }
    out = {}
    for block in SHAPES:
        tensors = [torch.zeros_like(given[0][block]), *(one[block] for one in given)]
        group = base.TensorGroup.from_tensors(tensors, ids=["base", *names], base_index=0, name=block)
        out[block] = registry.get(method).merge_group(group, **values)
    return out


class _Model(nn.Module):
    """A module whose buffers are given tensors; FusionBench 0.2.33 cannot add a tensor to a parameter."""

    def __init__(self, given: Vector) -> None:
        super().__init__()
        for name, values in given.items():
            self.register_buffer(name.replace(".", "_"), values.clone())

    def as_vector(self) -> Vector:
        found = self.state_dict()
        return {name: found[name.replace(".", "_")] for name in SHAPES}


def _fusion_bench_sum(given: Sequence[Vector]) -> Vector:
    module = _module("fusion_bench.method.task_arithmetic.task_arithmetic")
    base = _Model({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    done: _Model = module.task_arithmetic_merge(base, [_Model(one) for one in given], SCALE, inplace=False)
    return done.as_vector()


def _fusion_bench_mean(given: Sequence[Vector]) -> Vector:
    module = _module("fusion_bench.method.simple_average")
    done: _Model = module.simple_average([_Model(one) for one in given])
    return done.as_vector()


def _fusion_bench_ties(given: Sequence[Vector], share: float) -> Vector:
    module = _module("fusion_bench.method.ties_merging.ties_merging_utils")
    flat = torch.stack([module.state_dict_to_vector(one) for one in given])
    found = module.ties_merging(flat, reset_thresh=share, merge_func="mean")
    return {name: x.detach() for name, x in module.vector_to_state_dict(found, given[0]).items()}


def _spectral(module: str, function: str, **options: Any) -> Callable[[Sequence[Vector]], Vector]:
    def run(given: Sequence[Vector]) -> Vector:
        found: Vector = getattr(_module(module), function)(
            [{name: values.clone() for name, values in one.items()} for one in given],
            accelerator="cpu",
            **options,
        )
        return found

    return run


def _masks(rule: Dare, count: int) -> Iterator[Tensor]:
    """The elements that our rule keeps, vector by vector within a block, as both packages draw them."""
    for block, shape in SHAPES.items():
        for i in range(count):
            ones = torch.ones(shape, dtype=torch.float64)
            yield (rule.dropped(ones, str(i), block) != 0).double()


def _with_masks(name: str, masks: Iterator[Tensor], run: Callable[[], Vector]) -> Vector:
    """Run with ``torch.NAME`` returning our masks in place of new random numbers."""
    with mock.patch.object(torch, name, lambda *args, **options: next(masks).float()):
        return run()


def _fusion_bench_dare(given: Sequence[Vector]) -> Vector:
    module = _module("fusion_bench.method.dare.utils")
    rule = Dare(scale=SCALE, keep=KEEP)

    def run() -> Vector:
        dropped = [{name: values.clone() for name, values in one.items()} for one in given]
        for block in SHAPES:  # in the order of the masks
            for one in dropped:
                module.param_random_drop_(one[block], 1 - KEEP, True)
        return {name: SCALE * sum((one[name] for one in dropped), torch.zeros(())) for name in SHAPES}

    # its mask is "drawn > sparsity": 1 is kept, 0 is not
    return _with_masks("rand_like", _masks(rule, len(given)), run)


def _mergekit_dare(method: str) -> Callable[[Sequence[Vector]], Vector]:
    def run(given: Sequence[Vector]) -> Vector:
        masks = _masks(Dare(keep=KEEP), len(given))
        signs = method == "dare_ties"
        return _with_masks(
            "bernoulli",
            masks,
            lambda: _mergekit(
                method,
                given,
                weight=1.0 if signs else SCALE,
                density=KEEP,
                normalize=signs,
                rescale=True,
            ),
        )

    return run


@dataclass(frozen=True)
class Comparison:
    """A rule of ours, the function of a package that it is compared with, and what has to be known."""

    rule: str
    options: Mapping[str, Any]
    package: str
    function: str
    theirs: Callable[[Sequence[Vector]], Vector]
    note: str = ""
    expected_to_agree: bool = True


def comparisons() -> list[Comparison]:
    """All comparisons that the packages have functions for."""
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    same = (int(KEEP * elements) - 1) / elements + 1e-9
    plain, ties = {"scale": SCALE}, {"scale": 1.0, "keep": KEEP}
    as_mergekit = {**ties, "form": "mergekit"}
    iso = "fusion_bench.method.isotropic_merging.iso_utils"
    tsvm = "fusion_bench.method.task_singular_vector.utils.TSVM_utils"
    return [
        Comparison("mean", {}, FUSION_BENCH, "simple_average", _fusion_bench_mean),
        Comparison(
            "task-arithmetic",
            plain,
            MERGEKIT,
            "task_arithmetic",
            lambda given: _mergekit("task_arithmetic", given, weight=SCALE),
        ),
        Comparison(
            "task-arithmetic",
            plain,
            FUSION_BENCH,
            "task_arithmetic_merge",
            _fusion_bench_sum,
            "on buffers: with parameters it raises a TypeError",
        ),
        Comparison(
            "ties",
            as_mergekit,
            MERGEKIT,
            "ties",
            lambda given: _mergekit("ties", given, density=KEEP, normalize=True),
            "`form=mergekit`: trimmed tensor by tensor, a sum of zero counts as +",
        ),
        Comparison(
            "ties",
            ties,
            MERGEKIT,
            "ties",
            lambda given: _mergekit("ties", given, density=KEEP, normalize=True),
            "another definition: ours trims the whole vector, as the paper does, mergekit every tensor by "
            "itself; `form=mergekit` is its definition",
            expected_to_agree=False,
        ),
        Comparison(
            "ties",
            ties,
            FUSION_BENCH,
            "ties_merging, mean",
            lambda given: _fusion_bench_ties(given, same),
            "asked to keep one element of every vector less, see the next row",
        ),
        Comparison(
            "ties",
            ties,
            FUSION_BENCH,
            "ties_merging, mean",
            lambda given: _fusion_bench_ties(given, KEEP),
            "FusionBench keeps one element of every vector more than the share says: its threshold is the "
            "largest dropped element, and it keeps what is not below",
            expected_to_agree=False,
        ),
        Comparison(
            "dare",
            {"scale": SCALE, "keep": KEEP},
            FUSION_BENCH,
            "param_random_drop_, sum",
            _fusion_bench_dare,
            "with our random elements in place of its own",
        ),
        Comparison(
            "dare",
            {"scale": SCALE, "keep": KEEP, "form": "mergekit"},
            MERGEKIT,
            "dare_linear",
            _mergekit_dare("dare_linear"),
            "`form=mergekit`, with our random elements in place of its own, in float32",
        ),
        Comparison(
            "dare",
            {"scale": 1.0, "keep": KEEP, "form": "mergekit", "signs": True},
            MERGEKIT,
            "dare_ties",
            _mergekit_dare("dare_ties"),
            "`form=mergekit`, `signs=true`, with our random elements in place of its own, in float32",
        ),
        Comparison(
            "dare",
            {"scale": SCALE, "keep": KEEP},
            MERGEKIT,
            "dare_linear",
            _mergekit_dare("dare_linear"),
            "another definition: ours divides by the share that is kept, as the paper does, mergekit "
            "restores the sum of absolute values of every tensor; `form=mergekit` is its definition",
            expected_to_agree=False,
        ),
        Comparison(
            "tsv",
            {"scale": 1.0},
            FUSION_BENCH,
            "compute_and_sum_svd_mem_reduction",
            _spectral(tsvm, "compute_and_sum_svd_mem_reduction"),
        ),
        Comparison("iso-c", {"scale": 1.0}, FUSION_BENCH, "iso_c", _spectral(iso, "iso_c")),
        Comparison(
            "iso-cts",
            {"scale": 1.0},
            FUSION_BENCH,
            "iso_cts",
            _spectral(iso, "iso_cts", common_space_fraction=0.8),
        ),
    ]


MISSING = {
    "cart": "neither package has it",
    "aswudi": "neither package has closed forms of WUDI; FusionBench's wudi_merging takes 300 steps of Adam "
    "at a rate of 1e-5, which is another result",
    "swudi": "neither package has closed forms of WUDI",
}
"""Rules that are not compared; the tests compare them with their definitions, written again in numpy."""


def measured(one: Comparison, given: Sequence[Vector]) -> dict[str, Any]:
    """Return a row of the record; raises ImportError if the package, or what it needs, is not there.

    Ends the script if a comparison does not come out as its note says.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        theirs = one.theirs(given)
    found = difference(merged(new_merge_rule(one.rule, dict(one.options)), given), theirs)
    if (found < AGREES) != one.expected_to_agree:
        word = "differs" if one.expected_to_agree else "agrees"
        raise SystemExit(f"{one.rule} {word}: {found:.2e} from {one.package}'s {one.function}; {one.note}")
    options = ", ".join(f"{key}={value}" for key, value in one.options.items())
    where = {"rule": one.rule, "options": options, "package": one.package, "function": one.function}
    return {**where, "difference": found, "agrees": one.expected_to_agree, "note": one.note}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", type=Path, help="directory that pip installed the packages into")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.packages is not None:
        sys.path.append(str(options.packages))  # last: whatever aniso needs comes from its own environment
    given, rows = vectors(), []
    not_compared = [{"rule": rule, "package": "", "reason": reason} for rule, reason in MISSING.items()]
    for one in comparisons():
        try:
            row = measured(one, given)
        except ImportError as e:
            not_compared.append({"rule": one.rule, "package": one.package, "reason": str(e)})
            print(f"{one.rule:16} {one.package:12} {one.function}: not compared: {e}")
            continue
        rows.append(row)
        print(f"{one.rule:16} {one.package:12} {one.function:34} {row['difference']:.1e}  {one.note}")
    known = {row["rule"] for row in rows} | {row["rule"] for row in not_compared}
    assert known == set(MERGE_RULES.names), f"no word about {set(MERGE_RULES.names) - known}"
    record = {
        "versions": {name: _version(name) for name in ("aniso", "torch", MERGEKIT, FUSION_BENCH)},
        "vectors": VECTORS,
        "blocks": {name: list(shape) for name, shape in SHAPES.items()},
        "rows": rows,
        "not_compared": not_compared,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
