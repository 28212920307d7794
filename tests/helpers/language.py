"""Small language models with tokenizers of real text, saved as transformers saves them; texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "two",
    "dogs",
    "ran",
    "over",
    "green",
    "hills",
    "and",
    "one",
    "bird",
    "sang",
    "of",
    "rain",
    "in",
    "the",
    "old",
    "town",
    "when",
    "people",
    "walked",
    "home",
    "from",
    "work",
    "by",
    "the",
    "river",
    "under",
    "tall",
    "trees",
    "said",
    "so",
    "it",
    "was",
    "here",
    "now",
    "not",
    "far",
]


def tokenizer(kind: str, size: int = 300) -> Any:
    """Byte pairs for causal models, with T5's mark of an end at every end for the others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=marks, initial_alphabet=alphabet)
    made.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    around = {"llama": "<s> $A", "t5": "$A </s>"}.get(kind)
    if around is not None:
        ids = [(mark, made.token_to_id(mark)) for mark in marks[1:]]
        made.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def network(kind: str, size: int, width: int = 32, seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config
    from transformers import T5ForConditionalGeneration as T5

    torch.manual_seed(seed)
    marks: dict[str, Any] = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "gpt2":
        sizes = dict(n_embd=width, n_layer=2, n_head=4, n_positions=64)
        calm = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=size, **sizes, **calm, **marks))
    if kind == "llama":
        sizes = dict(hidden_size=width, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=size, num_key_value_heads=2, max_position_embeddings=64, **sizes, **marks)
        )
    sizes = dict(d_model=width, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return T5(T5Config(vocab_size=size, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **marks))


def save(kind: str, path: Path, **how: Any) -> Any:
    """A model and its tokenizer in a directory; the network is given back."""
    tokens = tokenizer(kind)
    made = network(kind, len(tokens), **how).eval()
    made.save_pretrained(path)
    tokens.save_pretrained(path)
    return made


def write_lines(path: Path, examples: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path
