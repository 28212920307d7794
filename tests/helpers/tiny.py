"""Small models of every family, made in the test that needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, LAYERS, EMBED, VOCABULARY, CONTEXT = 32, 2, 24, 64, 8


def plain(seed: int = 0) -> dict[str, Tensor]:
    """A model of no known family: matrices, biases, a norm, a scalar, an integer buffer."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"fc.weight": (96, 64), "fc.bias": (96,), "ln.weight": (64,), "gate": ()}
    out = {f"layers.{i}.{n}": torch.randn(s, generator=g) * 0.05 for i in range(3) for n, s in shapes.items()}
    out["steps"] = torch.arange(4)
    return out


def tuned(base: dict[str, Tensor], seed: int = 1, scale: float = 0.02) -> dict[str, Tensor]:
    """Fine-tuning, simulated: every float weight moves by about ``scale`` of its size."""
    g = torch.Generator().manual_seed(seed)
    return {k: _moved(k, v, g, scale) for k, v in base.items()}


def _moved(key: str, value: Tensor, g: torch.Generator, scale: float) -> Tensor:
    if not value.is_floating_point() or "running" in key:
        return value.clone()
    size = value.float().std().item() if value.numel() > 1 else float(value.abs())
    noise = torch.randn(value.shape, generator=g) * scale * max(size, 0.01)
    return (value.float() + noise).to(value.dtype)


def tuned_vision(
    base: dict[str, Tensor], is_vision: Callable[[str], bool], seed: int = 1
) -> dict[str, Tensor]:
    """Only the image encoder moves."""
    moved = tuned(base, seed)
    return {k: moved[k] if is_vision(k) else v.clone() for k, v in base.items()}


def open_clip_vit(seed: int = 0, *, quick_gelu: bool = False):
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(seed)
    vision = CLIPVisionCfg(image_size=16, patch_size=8, width=WIDTH, layers=LAYERS, head_width=16)
    text = CLIPTextCfg(context_length=CONTEXT, vocab_size=VOCABULARY, width=WIDTH, heads=2, layers=LAYERS)
    return CLIP(EMBED, vision, text, quick_gelu=quick_gelu).eval()


def open_clip_resnet(seed: int = 0):
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(seed)
    vision = CLIPVisionCfg(image_size=64, width=8, layers=(1, 1, 1, 1))
    text = CLIPTextCfg(context_length=CONTEXT, vocab_size=VOCABULARY, width=WIDTH, heads=2, layers=1)
    model = CLIP(EMBED, vision, text).eval()
    for name, buffer in model.named_buffers():  # as after training
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return model


def hf_config(activation: str = "gelu"):
    from transformers import CLIPConfig

    common = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
                  num_attention_heads=2, hidden_act=activation, projection_dim=EMBED)  # fmt: skip
    return CLIPConfig(
        vision_config=dict(image_size=16, patch_size=8, **common),
        text_config=dict(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, bos_token_id=62,
                         eos_token_id=63, pad_token_id=0, **common),
        projection_dim=EMBED,
    )  # fmt: skip


def hf_clip(seed: int = 0, activation: str = "gelu"):
    from transformers import CLIPModel

    torch.manual_seed(seed)
    model = CLIPModel(hf_config(activation)).eval()
    with torch.no_grad():  # fresh biases are zero, which would hide a wrong place
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def is_open_clip_vision(key: str) -> bool:
    return key.startswith("visual.")


def is_hf_vision(key: str) -> bool:
    return key.startswith(("vision_model.", "visual_projection."))


def tokenizer(length: int = 40):
    """CLIP's tokenizer over single letters."""
    from transformers import CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz.0123"]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    assert len(tokens) == VOCABULARY
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=length
    )


def hf_clip_directory(path, seed: int = 0, activation: str = "gelu", length: int = 40):
    """A whole CLIP as the hub has it: weights, configuration and tokenizer."""
    from transformers import CLIPModel

    torch.manual_seed(seed)
    config = hf_config(activation)
    config.text_config.max_position_embeddings = length
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(path)
    tokenizer(length).save_pretrained(path)
    return path


def hf_clip_state(path) -> dict[str, Tensor]:
    from aniso.weights import open_weights

    source = open_weights(path)
    return {key: source.read(key) for key in source.tensors}


def seeing(size):
    """An encoder that sees pictures of this size, and has no weights."""
    from aniso.models.encoder import Encoder, Family
    from aniso.models.transforms import Pixels

    return Encoder("seeing", nn.Identity(), Family(lambda network, images: images.flatten(1)), Pixels(size))
