"""Pre-train the mini model: a small CLIP on real images of 64 pixels, with captions made from class names.

    torchrun --nproc-per-node 2 scripts/mini/pretrain.py --data MINI --out RUN [--epochs 40]

MINI is a directory of tasks, each with `card.json` and `pool.parquet` (see docs/mini.md). Only `pool` files
are read: no image of a train, val or test split is ever seen. One process per core, each with one thread, is
faster than one process with two threads: the matrices are small. RUN/state.pt is written after every epoch,
and a second call goes on from there.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as parquet
import torch
import torch.distributed as dist
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

STORED, SIDE = 64, 48
# What a stranger would write about a picture, whatever the task's own prompts say.
GENERIC = ("{}", "a photo of a {}.", "a picture of a {}.", "a small image of {}.", "this is a {}.")
# Mirroring turns these into something else.
NO_FLIP = {"mnist", "svhn", "gtsrb", "sign_digits"}
VOCABULARY, CONTEXT = 2048, 32


class Pool:
    """Every pool image, decoded once, with its class as (task, class) and the ways to say it."""

    def __init__(self, root: Path) -> None:
        images: list[Tensor] = []
        owners: list[int] = []
        flips: list[bool] = []
        self.names: list[str] = []
        self.prompts: list[tuple[str, ...]] = []
        for card_file in sorted(root.glob("*/card.json")):
            card = json.loads(card_file.read_text())
            first = len(self.names)
            self.names += card["classes"]
            self.prompts += [tuple(card["prompts"])] * len(card["classes"])
            if not card["counts"].get("pool"):
                continue
            table = parquet.read_table(card_file.with_name("pool.parquet"), columns=["image", "label"])
            for cell, label in zip(table["image"], table["label"], strict=True):
                images.append(decode(cell["bytes"].as_py()))
                owners.append(first + label.as_py())
                flips.append(card["name"] not in NO_FLIP)
        self.images = torch.stack(images)
        self.owners = torch.tensor(owners)
        self.flip = torch.tensor(flips)

    def __len__(self) -> int:
        return len(self.images)

    def captions(self, owner: int) -> list[str]:
        return [prompt.format(self.names[owner]) for prompt in self.prompts[owner]]


def decode(data: bytes) -> Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if image.size != (STORED, STORED):
        image = image.resize((STORED, STORED), Image.Resampling.BICUBIC)
    return (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        .view(STORED, STORED, 3)
        .permute(2, 0, 1)
    )


def crops(images: Tensor, flip: Tensor, rng: torch.Generator) -> Tensor:
    """Random crops of 45-100 % of the area, in eight groups of one size each, so that resizing is batched."""
    out = []
    for group, mirrored in zip(images.chunk(8), flip.chunk(8), strict=True):
        height, width = (int(torch.randint(43, STORED + 1, (), generator=rng)) for _ in range(2))
        tops = torch.randint(0, STORED - height + 1, (len(group),), generator=rng)
        lefts = torch.randint(0, STORED - width + 1, (len(group),), generator=rng)
        rows = (tops[:, None] + torch.arange(height))[:, None, :, None]
        columns = (lefts[:, None] + torch.arange(width))[:, None, None, :]
        cut = group[
            torch.arange(len(group))[:, None, None, None], torch.arange(3)[:, None, None], rows, columns
        ]
        view = functional.interpolate(cut, (SIDE, SIDE), mode="bicubic", antialias=True)
        toss = (torch.rand(len(group), generator=rng) < 0.5) & mirrored
        out.append(torch.where(toss[:, None, None, None], view.flip(-1), view))
    return torch.cat(out)


def colours(images: Tensor, rng: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation by up to 30 %, sometimes grey; then CLIP's normalisation."""

    def factor() -> Tensor:
        return 0.7 + 0.6 * torch.rand(len(images), 1, 1, 1, generator=rng)

    pixels = images.float().div_(255).mul_(factor())
    mean = pixels.mean((1, 2, 3), keepdim=True)
    pixels = (pixels - mean).mul_(factor()).add_(mean)
    grey = pixels.mean(1, keepdim=True)
    saturation = factor() * (torch.rand(len(images), 1, 1, 1, generator=rng) > 0.1)
    return normalise((pixels - grey).mul_(saturation).add_(grey).clamp_(0, 1))


def normalise(pixels: Tensor) -> Tensor:
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    return (pixels - mean) / std


def make_tokenizer(pool: Pool) -> CLIPTokenizer:
    """CLIP's kind of BPE (lower case, `</w>` at word ends), learned from the captions."""
    texts = [text for owner in range(len(pool.names)) for text in pool.captions(owner)]
    texts += [template.format(name) for template in GENERIC for name in sorted(set(pool.names))]
    bare = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bare.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    bare.pre_tokenizer = cast(Any, CLIPTokenizer()).backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = (
        VOCABULARY - 2 - len(alphabet)
    )  # each byte also exists as a word's end, and two special tokens follow
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    state = json.loads(bare.to_str())["model"]
    vocabulary = sorted(state["vocab"], key=state["vocab"].__getitem__)
    known = set(vocabulary)
    vocabulary += [f"{byte}</w>" for byte in sorted(alphabet) if f"{byte}</w>" not in known]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(vocabulary)},
        merges=cast(Any, [tuple(merge) for merge in state["merges"]]),
        unk_token="<|endoftext|>",
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
    )


def make_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    tower = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "hidden_act": "gelu"}
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return CLIPModel(
        CLIPConfig(
            text_config=tower
            | tokens
            | {
                "num_hidden_layers": 3,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": CONTEXT,
                "pad_token_id": tokenizer.eos_token_id,
            },
            vision_config=tower | {"num_hidden_layers": 6, "image_size": SIDE, "patch_size": 8},
            projection_dim=128,
        )
    )


class Contrast(nn.Module):
    """Both towers and the loss; a caption that several images share is one text with several positives."""

    def __init__(self, clip: CLIPModel) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, pixels: Tensor, ids: Tensor, which: Tensor) -> Tensor:
        image = functional.normalize(self.clip.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
        text = functional.normalize(self.clip.get_text_features(input_ids=ids).pooler_output, dim=-1)
        logits = self.clip.logit_scale.exp() * image @ text.T
        to_text = functional.cross_entropy(logits, which, label_smoothing=0.05)
        shares = functional.one_hot(which, len(text)).to(logits.dtype)
        to_image = -(logits.log_softmax(0) * shares / shares.sum(0)).sum(0).mean()
        return (to_text + to_image) / 2


def caption_batch(
    pool: Pool, owners: Tensor, tokenizer: CLIPTokenizer, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Distinct captions, one per class in the batch, and the caption of every image."""
    texts: dict[str, int] = {}
    said: dict[int, int] = {}
    for owner in sorted(set(cast("list[int]", owners.tolist()))):
        own = pool.captions(owner)
        draw = int(torch.randint(0, 1 << 30, (), generator=rng))
        generic = torch.rand((), generator=rng) < 0.3
        text = GENERIC[draw % len(GENERIC)].format(pool.names[owner]) if generic else own[draw % len(own)]
        said[owner] = texts.setdefault(text, len(texts))
    ids = tokenizer(list(texts), padding="longest", truncation=True, max_length=CONTEXT, return_tensors="pt")
    return ids["input_ids"], torch.tensor([said[int(owner)] for owner in owners])


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    rest = [value for value in model.parameters() if value.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def train(args: argparse.Namespace) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    pool = Pool(args.data)
    tokenizer = make_tokenizer(pool)
    contrast = Contrast(make_model(tokenizer))
    model = DistributedDataParallel(contrast) if world > 1 else contrast
    optimiser = torch.optim.AdamW(groups(contrast, 0.1), lr=args.lr, betas=(0.9, 0.98))
    per_epoch = len(pool) // args.batch
    steps = args.epochs * per_epoch
    state_file, first = args.out / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        contrast.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        first = state["epoch"]
    begun = time.time()
    for epoch in range(first, args.epochs):
        rng = torch.Generator().manual_seed(args.seed * 1000 + epoch)
        order = torch.randperm(len(pool), generator=rng)  # the same on every rank
        own = torch.Generator().manual_seed((args.seed * 1000 + epoch) * 64 + rank + 1)
        total = 0.0
        for number in range(per_epoch):
            step = epoch * per_epoch + number
            warm = min(1.0, (step + 1) / 300)
            for group in optimiser.param_groups:
                group["lr"] = args.lr * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            batch = order[number * args.batch : (number + 1) * args.batch][rank::world]
            pixels = colours(crops(pool.images[batch], pool.flip[batch], own), own)
            ids, which = caption_batch(pool, pool.owners[batch], tokenizer, own)
            loss = model(pixels, ids, which)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(contrast.parameters(), 1.0)
            optimiser.step()
            with torch.no_grad():
                contrast.clip.logit_scale.clamp_(max=math.log(100))
            total += loss.item()
            if rank == 0 and number % 20 == 0:
                rate = (step + 1 - first * per_epoch) * args.batch / (time.time() - begun)
                mean = total / (number + 1)
                print(
                    f"epoch {epoch} step {number}/{per_epoch} loss {mean:.3f} {rate:.0f} images/s", flush=True
                )
        if rank == 0:
            state = {"model": contrast.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch + 1}
            torch.save(state, state_file.with_suffix(".new"))
            state_file.with_suffix(".new").replace(state_file)
            contrast.clip.save_pretrained(args.out / "model")
            tokenizer.save_pretrained(args.out / "model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256, help="images per step, over all processes")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
