"""safetensors files, PEFT adapters and images."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import ClassVar

import torch

from . import mutations as change
from .containers import packed, unpacked
from .targets import Case, Target


class Safetensors(Target):
    """Headers above all: they are what a reader believes."""

    name: ClassVar[str] = "safetensors"

    def prepare(self, place: Path) -> None:
        from aniso.weights import save_safetensors

        tensors = {
            "visual.proj": torch.arange(12.0).reshape(3, 4),
            "text.bias": torch.ones(3, dtype=torch.bfloat16),
            "ids": torch.arange(5),
            "none": torch.zeros(0, 4),
        }
        save_safetensors(place / "seed", tensors, {"format": "pt", "note": "x"})
        self._data = (place / "seed").read_bytes()

    def case(self, rng: random.Random) -> Case:
        if rng.random() < 0.2:
            return Case({"model.safetensors": change.any_bytes(rng, self._data)})
        header, body = unpacked(self._data)
        edited = change.json_bytes(rng, change.json_edited(rng, header))
        data = packed(edited, body if rng.random() < 0.9 else change.any_bytes(rng, body))
        if rng.random() < 0.1:
            data = change.number_edited(rng, data[:8]) + data[8:]
        return Case({"model.safetensors": data})

    def read(self, folder: Path) -> None:
        from aniso.vectors.summary import summarise_source
        from aniso.weights import open_weights

        source = open_weights(folder / "model.safetensors")
        summarise_source(source, allow_nonfinite=True).to_json()
        summarise_source(source, hashes=True, allow_nonfinite=True).to_json()


class Adapters(Target):
    """PEFT directories: a configuration that decides what the tensors mean."""

    name: ClassVar[str] = "adapters"

    def prepare(self, place: Path) -> None:
        from aniso.weights import save_safetensors

        module = "base_model.model.layers.0.q_proj"
        tensors = {
            f"{module}.lora_A.weight": torch.ones(2, 6),
            f"{module}.lora_B.weight": torch.ones(4, 2),
            f"{module.replace('q_', 'v_')}.lora_A.weight": torch.ones(4, 6),
            f"{module.replace('q_', 'v_')}.lora_B.weight": torch.ones(4, 4),
        }
        save_safetensors(place / "seed", tensors)
        self._tensors = (place / "seed").read_bytes()
        self._config = {
            "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "use_dora": False,
            "bias": "none", "rank_pattern": {"v_proj": 4}, "alpha_pattern": {r".*\.q_proj": 8.0},
            "fan_in_fan_out": False, "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": "owner/base",
            "init_lora_weights": True, "auto_mapping": {"base_model_class": "X"}, "modules_to_save": None,
        }  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        config, tensors = json.dumps(self._config).encode(), self._tensors
        if rng.random() < 0.75:
            config = change.json_bytes(rng, change.json_edited(rng, self._config))
        if rng.random() < 0.35:
            header, body = unpacked(tensors)
            tensors = packed(change.json_bytes(rng, change.json_edited(rng, header)), body)
        return Case({"adapter_config.json": config, "adapter_model.safetensors": tensors})

    def read(self, folder: Path) -> None:
        from aniso.vectors.summary import summarise_source
        from aniso.weights import open_weights

        summarise_source(open_weights(folder), hashes=True, allow_nonfinite=True).to_json()


class Images(Target):
    """Images of every format that is read."""

    name: ClassVar[str] = "images"

    def prepare(self, place: Path) -> None:
        from PIL import Image

        image = Image.radial_gradient("L").resize((40, 30))
        rgb = Image.merge("RGB", (image, image, image))
        kinds = {
            "PNG": rgb, "JPEG": rgb, "WEBP": rgb, "BMP": rgb, "GIF": rgb.quantize(8), "TIFF": rgb, "PPM": rgb,
        }  # fmt: skip
        self._files = []
        for kind, value in kinds.items():
            out = io.BytesIO()
            value.save(out, kind)
            self._files.append(out.getvalue())
        for value, kind, options in (
            (rgb, "JPEG", {"progressive": True}),
            (rgb, "TIFF", {"compression": "tiff_lzw"}),
            (image.convert("I;16"), "PNG", {}),
            (image.convert("F"), "TIFF", {}),
            (rgb.convert("CMYK"), "TIFF", {"compression": "tiff_deflate"}),
        ):
            out = io.BytesIO()
            value.save(out, kind, **options)
            self._files.append(out.getvalue())

    def case(self, rng: random.Random) -> Case:
        data = rng.choice(self._files)
        for _ in range(rng.randint(1, 3)):
            head = rng.randint(1, 60)  # where sizes and offsets are
            if rng.random() < 0.6:
                data = change.any_bytes(rng, data[:head]) + data[head:]
            else:
                data = change.any_bytes(rng, data)
        return Case({"image": data})

    def read(self, folder: Path) -> None:
        from aniso.data.decode import decode

        assert decode((folder / "image").read_bytes(), "image").mode == "RGB"
