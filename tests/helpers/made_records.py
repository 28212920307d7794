"""Records of made-up runs, as JSON would give them."""

from __future__ import annotations

import itertools
import json

from aniso.coefficient_matrix import BlockLabel, CoefficientMatrix
from aniso.records import Record

_numbers = itertools.count()
LAYER = {
    **{f"ln_{n}.{end}": "norm" for n in (1, 2) for end in ("weight", "bias")},
    **{f"attn.in_proj_{end}": "attention weight" for end in ("weight",)},
    **{f"attn.out_proj.{end}": "attention weight" for end in ("weight",)},
    **{f"mlp.{name}.weight": "mlp weight" for name in ("c_fc", "c_proj")},
    **dict.fromkeys(("attn.in_proj_bias", "attn.out_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias"), "bias"),
}
"""The twelve blocks of a CLIP's layer, and their kinds."""
BLOCKS = [
    BlockLabel("visual.conv1.weight", "conv weight"),
    *(
        BlockLabel(f"visual.transformer.resblocks.{depth}.{name}", kind, depth)
        for depth in (0, 1)
        for name, kind in LAYER.items()
    ),
]
_AXES = {
    "few-shot": lambda task: {"task": task, "shots": 4},
    "data-fraction": lambda task: {"task": task, "fraction": 0.25},
    "negation": lambda task: {"target": task, "control": "guard"},
}


def matrix(value, vectors=("a", "b"), blocks=BLOCKS):
    """Coefficients given by a function of vector and block."""
    rows = [[value(vector, block) for block in blocks] for vector in vectors]
    made = CoefficientMatrix.of(vectors, blocks, rows)
    return {"kind": {}, "depth": {}, "matrix": json.loads(made.model_dump_json())}


def run(setting="few-shot", accuracy=None, label="learned", right=None, **changes):
    """A record; ``right`` has one letter per image by task, 1 where it was classified correctly."""
    accuracy = dict(accuracy or {"a": 0.5})
    axes = _AXES.get(setting, lambda task: {"tasks": list(accuracy)})(next(iter(accuracy)))
    if setting == "negation":
        accuracy.setdefault("guard", 0.4)
    scores = {t: {"correct": round(1000 * x), "total": 1000, "accuracy": x} for t, x in accuracy.items()}
    for task, letters in (right or {}).items():
        count = letters.count("1")
        scores[task] = {
            "correct": count,
            "total": len(letters),
            "accuracy": count / len(letters),
            "right": f"{int(letters[::-1], 2):x}",
        }
    metrics = {"accuracy": scores} | changes.pop("metrics", {})
    inputs = {"model": "m", "data": {t: f"data of {t}" for t in scores}} | changes.pop("inputs", {})
    spec = {"setting": setting, "model": "mini", "bank": "mini", "method": "coefficients", "seed": 0} | axes
    parts = {name: changes.pop(name) for name in ("experiment", "coefficients", "status") if name in changes}
    return Record.model_validate_json(
        json.dumps(
            {
                "schema": 1,
                "id": f"{next(_numbers):064x}",
                "experiment": setting,
                "label": label,
                "spec": spec | changes,
                "metrics": metrics,
                "inputs": inputs,
                **parts,
            }
        )
    )


def zero_shot(setting="few-shot", accuracy=None, **changes):
    """A record of the base itself."""
    return run(setting, accuracy, "zero-shot", method="none", shots=None, **changes)
