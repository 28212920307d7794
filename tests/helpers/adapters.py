"""Adapters with random factors, as PEFT writes them, and small language models to have them."""

from __future__ import annotations

import torch


def random_adapter(model, path, seed=0, scale=0.05, **config):
    """A PEFT adapter with random factors, saved; returns the weights PEFT merges it to."""
    import peft

    wrapped = peft.get_peft_model(model, peft.LoraConfig(**config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                if "magnitude" in name:
                    parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
                else:
                    parameter.add_(torch.randn_like(parameter) * scale)
    wrapped.save_pretrained(path)
    merged = wrapped.merge_and_unload()
    return {k: v.detach().clone() for k, v in merged.state_dict().items()}


def language_models():
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        OpenAIGPTConfig,
        OpenAIGPTLMHeadModel,
        T5Config,
    )
    from transformers import T5ForConditionalGeneration as T5

    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return {
        "gpt2": (
            lambda: GPT2LMHeadModel(
                GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16)
            ),
            dict(target_modules=["c_attn", "c_proj", "wte"], fan_in_fan_out=True),
        ),
        "gpt": (
            lambda: OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16)
            ),
            dict(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
        ),
        "llama": (
            lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **small)),
            dict(target_modules="all-linear"),
        ),
        "t5": (
            lambda: T5(T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)),
            dict(target_modules=["q", "v", "wo"]),
        ),
    }
