"""LP++ and Tip-Adapter against direct transcriptions of their published update rules, on toy features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from aniso.errors import UsageError
from aniso.learn.heads import LPP, TipAdapter, head_options, load_head, new_head
from aniso.models import ClassWeights

CLASSES, WIDTH = 4, 10


def class_weights(scale: float = 30.0) -> ClassWeights:
    drawn = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    return ClassWeights(("ant", "bee", "cat", "dog"), scale * functional.normalize(drawn, dim=-1))


def shots(each: int = 3, views: int = 2) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    labels = torch.arange(CLASSES).repeat(each)
    centres = torch.randn(CLASSES, WIDTH, generator=rng)
    return centres[labels] + 0.8 * torch.randn(views, len(labels), WIDTH, generator=rng), labels


def lpp_by_autograd(steps: int, momentum: float, alpha_start: float | None = None) -> dict[str, Tensor]:
    """Huang et al. 2024: SGD on weight and bias, alpha by plain steps every tenth time."""
    views, labels = shots()
    views = functional.normalize(views, dim=-1).double()
    features, wanted = views.flatten(0, 1), labels.repeat(len(views))
    text = features @ functional.normalize(class_weights().weight, dim=-1).double().T
    count = len(features)
    probe = torch.nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        probe.bias.zero_()
        for k in range(CLASSES):
            probe.weight[k] = views.mean(0)[labels == k].sum(0)
    own = torch.stack([text[wanted == k, k].mean() for k in range(CLASSES)]).mean()
    start = 250 * float(own) if alpha_start is None else alpha_start
    alpha = torch.full((CLASSES,), start, dtype=torch.float64, requires_grad=True)
    step = 4 * count / float(torch.linalg.eigvalsh(features.T @ features).max())
    alpha_step = count / (4 * float(text.square().sum(0).max()))
    optimiser = torch.optim.SGD(probe.parameters(), lr=step, momentum=momentum)
    for number in range(1, steps + 1):
        optimiser.zero_grad()
        functional.cross_entropy(probe(features) + alpha * text, wanted).backward()
        optimiser.step()
        if number % 10 == 0:
            loss = functional.cross_entropy(probe(features) + alpha * text, wanted)
            (gradient,) = torch.autograd.grad(loss, alpha)
            with torch.no_grad():
                alpha -= alpha_step * gradient
    return {"prototypes": probe.weight.detach(), "bias": probe.bias.detach(), "alpha": alpha.detach()}


@pytest.mark.parametrize("steps", [1, 10, 45])
def test_lpp_is_sgd_with_momentum_and_a_bias_by_default(steps: int) -> None:
    views, labels = shots()
    head = LPP(class_weights(), steps=steps)
    head.fit(views, labels)
    expected = lpp_by_autograd(steps, 0.9)
    for name, tensor in expected.items():
        torch.testing.assert_close(head.tensors()[name].double(), tensor, rtol=1e-3, atol=1e-3)
    assert bool(expected["bias"].abs().max() > 1e-3)


def test_alpha_may_start_at_the_models_logit_scale() -> None:
    views, labels = shots()
    head = LPP(class_weights(30.0), steps=20, alpha_start="logit-scale")
    head.fit(views, labels)
    expected = lpp_by_autograd(20, 0.9, 30.0)
    torch.testing.assert_close(head.alpha.double(), expected["alpha"], rtol=1e-4, atol=1e-4)


def test_the_default_options_of_lpp_are_those_of_its_authors() -> None:
    found = head_options("lpp")
    assert found["momentum"] == 0.9 and found["bias"] is True and found["steps"] == 300


def test_options_of_a_head_are_read_by_type_and_unknown_ones_refused() -> None:
    assert head_options("lpp", ["bias=false", "momentum=0"])["bias"] is False
    with pytest.raises(UsageError, match="no option 'momentun'"):
        head_options("lpp", ["momentun=0"])
    with pytest.raises(UsageError, match="invalid value 'perhaps'"):
        head_options("lpp", ["bias=perhaps"])
    with pytest.raises(UsageError, match="momentum 1"):
        new_head("lpp", class_weights(), head_options("lpp", ["momentum=1"]))


@pytest.mark.parametrize("bias", [True, False])
def test_a_saved_lpp_predicts_the_same(tmp_path: Path, bias: bool) -> None:
    views, labels = shots()
    head = LPP(class_weights(), steps=12, bias=bias)
    head.fit(views, labels)
    head.save(tmp_path / "head.safetensors", {"model": "abc"})
    assert ("bias" in load_file(tmp_path / "head.safetensors")) is bias
    found = load_head(tmp_path / "head.safetensors").head
    assert torch.equal(found.logits(views[0]), head.logits(views[0]))
    assert found.settings() == head.settings()


def tip_by_autograd(
    steps: int, batch_size: int, alpha: float, beta: float, decay: float
) -> tuple[dict[str, Tensor], int]:
    """Zhang et al. 2022, with the two scalars learned: passes over the shots in batches, AdamW, cosine."""
    views, labels = shots(each=6)
    views = functional.normalize(views, dim=-1)
    base, values = class_weights(), functional.one_hot(labels, CLASSES).float()
    keys = functional.normalize(views.mean(0), dim=-1).requires_grad_()
    scalars = [torch.tensor(alpha, requires_grad=True), torch.tensor(beta, requires_grad=True)]
    groups = [{"params": [keys], "lr": 1e-3}, {"params": scalars, "lr": 1e-1}]
    optimiser = torch.optim.AdamW(groups, weight_decay=decay, eps=1e-4)
    count = len(labels)
    each = -(-count // batch_size)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps * each)
    for number in range(steps):
        order = torch.arange(count)
        if each > 1:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(number))
        for rows in order.split(batch_size):
            seen = views[number % len(views)][rows]
            near = torch.exp(-scalars[1] * (1 - seen @ keys.T))
            loss = functional.cross_entropy(base.logits(seen) + scalars[0] * near @ values, labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            cosine.step()
    return {"keys": keys.detach(), "alpha": scalars[0].detach(), "beta": scalars[1].detach()}, each


@pytest.mark.parametrize("batch_size", [7, 256])
def test_tip_takes_passes_in_batches_with_weight_decay(batch_size: int) -> None:
    views, labels = shots(each=6)
    head = TipAdapter(class_weights(), steps=9, batch_size=batch_size)
    losses = head.fit(views, labels).losses
    expected, each = tip_by_autograd(9, batch_size, 2.0, 1.0, 0.01)
    assert len(losses) == 9 and each == (4 if batch_size == 7 else 1)
    for name, tensor in expected.items():
        torch.testing.assert_close(head.tensors()[name], tensor, rtol=1e-3, atol=1e-4)


def test_full_batches_without_decay_are_an_option_of_tip() -> None:
    views, labels = shots(each=6)
    options = head_options("tip", ["alpha=1", "beta=5.5", "batch_size=0", "decay=0", "steps=9"])
    head = new_head("tip", class_weights(), options)
    head.fit(views, labels)
    expected, _ = tip_by_autograd(9, 24, 1.0, 5.5, 0.0)
    torch.testing.assert_close(head.tensors()["keys"], expected["keys"], rtol=1e-3, atol=1e-4)


def test_the_default_options_of_tip_are_those_of_the_papers_runs() -> None:
    expected = {"steps": 300, "alpha": 2.0, "beta": 1.0, "batch_size": 256, "decay": 0.01}
    assert head_options("tip") == expected
