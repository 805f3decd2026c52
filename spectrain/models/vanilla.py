"""The vanilla drafter: a small ordinary Llama with the target's vocabulary."""

from __future__ import annotations

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spectrain.errors import UserError
from spectrain.models.kinds import Kind
from spectrain.models.pruned_init import draw_weights

KIND = Kind(
    *("drafter", "vanilla drafter", "spectrain.train +exp=vanilla"),
    method="speculative",
    library="transformers",
    about="A small ordinary language model that drafts tokens for a larger one with the same vocabulary to verify.",
    auto={"speculative": ()},
)
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DRAFT_TOKENS = 5  # drafted per step by other engines; vLLM's own example has 5


def new_vanilla(
    target: PreTrainedModel, n_layer: int | None = None, hidden_size: int | None = None
) -> LlamaForCausalLM:
    """Return a new Llama to train, by default with half the target's layers and width: 1/8 of its body parameters.

    It has as many heads as the target, of smaller width, as SPIRe's vanilla drafter.
    """
    config = target.config
    hidden = hidden_size or config.hidden_size // 2
    n_head = config.num_attention_heads
    if hidden % (2 * n_head):
        raise UserError(f"hidden_size={hidden} must be a multiple of {2 * n_head}: RoPE turns pairs in {n_head} heads")
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=wide * hidden // config.hidden_size,
            num_hidden_layers=n_layer or max(1, config.num_hidden_layers // 2),
            num_attention_heads=n_head,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or n_head,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=getattr(config, "rope_parameters", None),
            tie_word_embeddings=target.get_output_embeddings().weight is target.get_input_embeddings().weight,
            **{name: getattr(config, name) for name in ENDS},
            attn_implementation="sdpa",
        )
    )
    model.apply(draw_weights)
    # For transformers' `generate(assistant_model=...)`: the target's ends of text, and no sampling options. By default
    # transformers drafts 20 tokens per step, for drafters that agree with the target far longer.
    known = target.generation_config
    model.generation_config = GenerationConfig(
        **{name: getattr(known, name) for name in ENDS},
        num_assistant_tokens=DRAFT_TOKENS,
        num_assistant_tokens_schedule="constant",
    )
    return model
