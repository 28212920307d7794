"""The architectures of transformers that aniso builds: one table, because a file must never choose the code.

To add a family, add its ``model_type`` to a row, or a row for a loader of its own. A family may be listed if

* its configuration class holds numbers, flags and words (names of activations, of layer types), and its
  sub-configurations are classes of the library itself, never ``AutoConfig`` and never a ``backbone``;
* its network is made of the library's own layers: no timm model inside, no kernel from the hub (which is
  why state-space models such as Mamba are missing).

``tests/faults/test_untrusted_models.py`` checks the first rule for every row with the installed library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from aniso.errors import InputError, printable


@final
@dataclass(frozen=True)
class Row:
    """Model types that one class of transformers builds."""

    builder: str
    """Name of the class in ``transformers``; an ``AutoModel...`` picks the network by the configuration."""
    model_types: frozenset[str]


@final
@dataclass(frozen=True)
class Loader:
    """The rows that one loader may use, and the words for its errors."""

    what: str
    expected: str
    rows: tuple[Row, ...]

    @property
    def model_types(self) -> frozenset[str]:
        return frozenset().union(*(row.model_types for row in self.rows))

    def require(self, model_type: object, where: object) -> str:
        """Return ``model_type`` if this loader builds it; else raises an error with an alternative."""
        if isinstance(model_type, str) and model_type in self.model_types:
            return model_type
        raise InputError(
            "MODEL-NAME",
            f"'{printable(where)}' holds no {self.what} of a supported architecture",
            found=printable(f"model_type {model_type}"),
            expected=self.expected,
            supported=printable(", ".join(sorted(self.model_types)), 2000),
            fix="give the architecture by name (load_model('ViT-B-32' or 'timm:NAME', weights=DIR)), "
            "or open an issue that names the model_type",
        )


_LARGEST_GRID = 16  # patches on a side; the published LeViTs have 14


def require_small_grid(model_type: str, config: Any, where: object) -> None:
    """Refuse a LeViT of many patches: its constructor loops in Python over every pair of them.

    With n patches on a side these are n**4 steps for each layer, before any tensor exists to be counted.
    """
    if model_type != "levit" or config.image_size // config.patch_size <= _LARGEST_GRID:
        return
    raise InputError(
        "DIR-CONFIG",
        f"'{printable(where)}' describes a LeViT with too many patches",
        key="image_size",
        found=printable(f"image_size {config.image_size}, patch_size {config.patch_size}"),
        expected=f"at most {_LARGEST_GRID} patches on a side",
        fix="use the configuration that belongs to these weights, or the same model from timm",
    )


def _row(builder: str, model_types: str) -> Row:
    return Row(builder, frozenset(model_types.split()))


CLIP = Loader(
    "CLIP",
    "a CLIP or an image classifier",
    (
        _row("CLIPModel", "clip"),
        _row("CLIPVisionModelWithProjection", "clip_vision_model"),
    ),
)

IMAGE_CLASSIFIER = Loader(
    "model that gives image features",
    "a CLIP or an image classifier",
    (
        _row(
            "AutoModelForImageClassification",
            "beit bit convnext convnextv2 cvt data2vec-vision deit dinat dinov2 dinov2_with_registers "
            "donut-swin efficientnet focalnet hgnet_v2 hiera ijepa imagegpt levit mobilenet_v1 "
            "mobilenet_v2 mobilevit mobilevitv2 poolformer pp_lcnet pvt pvt_v2 regnet resnet segformer "
            "siglip swiftformer swin swinv2 textnet vit vit_msn",
        ),
    ),
)

SENTENCE_ENCODER = Loader(
    "sentence encoder",
    "a BERT-like model of transformers, with the pooling that sentence-transformers stores",
    (_row("AutoModel", "bert camembert distilbert mpnet roberta xlm-roberta"),),
)

CAUSAL = _row(
    "AutoModelForCausalLM",
    "afmoe apertus arcee bart bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot "
    "blenderbot-small bloom camembert codegen cohere cohere2 cpmant ctrl cwm data2vec-text deepseek_v2 "
    "deepseek_v3 diffllama doge dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 falcon flex_olmo gemma "
    "gemma2 gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese "
    "gpt_oss gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe "
    "llama llama4_text longcat_flash marian mbart megatron-bert minimax minimax_m2 ministral ministral3 "
    "mistral mixtral modernbert-decoder mpt mvp nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt "
    "pegasus persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta "
    "roberta-prelayernorm roc_bert roformer seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma "
    "xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu",
)
SEQUENCE_TO_SEQUENCE = _row(
    "AutoModelForSeq2SeqLM",
    "bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp "
    "nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5",
)
LANGUAGE_MODEL = Loader(
    "language model",
    "a causal or sequence-to-sequence model of transformers",
    (CAUSAL, SEQUENCE_TO_SEQUENCE),
)
