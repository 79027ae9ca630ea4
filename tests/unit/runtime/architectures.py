"""Tiny configurations of the architectures that the runtime is tried with."""

import transformers as tr

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "bos_token_id": 1,
}
ARCHITECTURES = {
    "gpt2": lambda: tr.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, eos_token_id=2
    ),
    "qwen2": lambda: tr.Qwen2Config(**SHAPE),
    "qwen2_window": lambda: tr.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: tr.Qwen3Config(**SHAPE, head_dim=8),
    "qwen3_window": lambda: tr.Qwen3Config(
        **SHAPE, head_dim=8, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "gemma": lambda: tr.GemmaConfig(**SHAPE, head_dim=8),
    "gemma2": lambda: tr.Gemma2Config(**SHAPE, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "gemma3": lambda: tr.Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "phi": lambda: tr.PhiConfig(**SHAPE),
    "phi3_window": lambda: tr.Phi3Config(**SHAPE, sliding_window=16),
    "mistral_window": lambda: tr.MistralConfig(**SHAPE, head_dim=8, sliding_window=16),
    "cohere": lambda: tr.CohereConfig(**SHAPE, logit_scale=0.5),
}
