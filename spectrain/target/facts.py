"""What the configs of a model say of it."""

from __future__ import annotations

from functools import cached_property

import torch
from transformers import PretrainedConfig, PreTrainedModel


class ModelFacts:
    """What is known of a model of transformers by its configs alone."""

    config: PretrainedConfig
    model: PreTrainedModel
    dtype: torch.dtype  # of its computations

    @property
    def n_layer(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that a token has in the cache."""
        config = self.config.get_text_config()
        n_kv_head = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * self.n_layer * n_kv_head * head_dim * self.dtype.itemsize

    @cached_property  # each step asks, and transformers takes its time to answer
    def max_positions(self) -> int:
        """Tokens of the longest sequence; a very large number for models without a limit."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None) or 2**31
        return min(longest, self.rope_tokens or longest)

    @property
    def limit(self) -> str:
        """Its `max_positions` for messages, and why they are fewer than its config says."""
        where = ", where its RoPE of type longrope changes" if self.max_positions == self.rope_tokens else ""
        return f"{self.max_positions}{where}"

    @property
    def rope_tokens(self) -> int | None:
        """Tokens up to which RoPE of type longrope has the same frequencies, None for other types.

        A forward that reaches further takes others for all of its tokens. Nodes of a tree that lies across the limit
        would not be rotated as in plain decoding, so texts end there.
        """
        rope = getattr(self.config.get_text_config(), "rope_parameters", None) or {}
        return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a text, from the generation config where it has any."""
        for config in (self.model.generation_config, self.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
        return ()
