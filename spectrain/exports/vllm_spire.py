"""A SPIRe drafter behind vLLM's EAGLE-3 proposer: the class that `architectures` in `vllm/config.json` names.

It imports vLLM and torch, and of spectrain only what imports neither. It was run with vLLM 0.32.0 on a CPU, by the V1
runner (`vllm/v1/spec_decode/llm_base_proposer.py`). The V2 runner, which needs Triton, was read, not run
(`vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py` and `eagle/utils.py`). It loads the class, shares
the target's tables, sizes its buffer, calls `combine_hidden_states` and hands states on in the same way.

For each token of a step, at position p, the proposer gives `positions` p, the token at p + 1 as `input_ids`, the slot
of p in the caches of the draft layers, and as `hidden_states` what `combine_hidden_states` made of the target's states.
The model returns the state for the logits, and the state that is given with the next drafted token. That is how SPIRe
reads a text, shifted by one:

- The hidden states are the memories of all blocks at p, and the final state where the drafter reads it. So they are
  several times as wide as the target, which `hidden_size` in config.json says. The memories of drafted tokens come back
  as the state handed on.
- K and V of the memories at p are written to the slot of p. The token at p + 1 asks with RoPE at p + 1.
- The next step writes the target's memories to the slots of drafted tokens before anything reads them.

Attention is `stock`, vLLM's own with a sliding window, or `exact`, as the drafter was trained. They differ in a token's
own key and in the sink tokens, which vLLM's attention lacks, and agree for a drafter that was trained without them.
`exact` gathers the few keys of a window by itself. So it needs no log-sum-exp, which not every backend returns, to add
the own key and the sinks to a window's result. Neither waits for the host, as CUDA graphs demand, but
no graph was recorded yet. `exact` gives zeros in a run without metadata, so serve it with --enforce-eager.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from spectrain.exports.vllm_versions import FORMAT, warn_if_samples_are_wrong

logger = init_logger("vllm.spectrain.spire")  # below vLLM's own, so that it is shown

FINAL = -1  # among target_layers: the state behind the target's last norm
READ_BY_EXACT = ("CPU_ATTN", "FLASH_ATTN")  # backends whose caches hold each block in one piece


def refuse(sentence: str) -> None:
    """Log a sentence under a name by which it is found above the tracebacks of three processes; raise ValueError."""
    logger.error("SPIRe drafter refused: %s", sentence)
    raise ValueError(sentence)


def check_fits(facts: dict, vllm_config: VllmConfig) -> None:
    """Refuse a folder that this class cannot read, or that is for another target, before anything is built."""
    if (version := facts.get("version")) != FORMAT:
        refuse(
            f"the drafter's folder has format {version}, but this spectrain reads {FORMAT}; write it anew with "
            "spectrain export drafter=... by the same version of spectrain"
        )
    wanted, served = facts["target"], vllm_config.model_config
    text = served.hf_text_config
    found = {name: getattr(text, name) for name in ("vocab_size", "hidden_size")}
    found["n_blocks"] = served.get_total_num_hidden_layers()
    if names := [name for name in found if found[name] != wanted[name]]:
        sizes = [", ".join(f"{name} {one[name]}" for name in names) for one in (wanted, found)]
        refuse(
            f"the drafter was trained for {wanted['name']} ({sizes[0]}), not for {served.model} ({sizes[1]}); "
            "serve that target, or train a drafter for this one"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        refuse("a SPIRe drafter needs the target's embedding on its rank; serve with pipeline_parallel_size=1")
    n_tokens, k = vllm_config.speculative_config.num_speculative_tokens, facts["spire"]["k"]
    if n_tokens > k:
        logger.warning(
            "num_speculative_tokens=%d is more than the %d tokens that this SPIRe drafter was trained to draft; "
            "later ones are seldom accepted",
            *(n_tokens, k),
        )


class SpireBlock(nn.Module):
    """One block, whose keys and values are those of memories, not of its own input."""

    def __init__(self, vllm_config: VllmConfig, facts: dict, prefix: str, cache: str) -> None:
        super().__init__()
        spire, shape = facts["spire"], facts["spire"]["shape"]
        width, eps, head = shape["hidden_size"], shape["rms_norm_eps"], shape["head_dim"]
        n_head, n_kv_head, linear = shape["n_head"], shape["n_kv_head"], {"return_bias": False}
        self.head_dim, self.is_exact = head, facts["attention"] == "exact"
        self.input_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        # Products of one matrix of the export, for tokens and for memories. The second has no queries of its own.
        bias = shape["qkv_bias"]
        self.q = ColumnParallelLinear(width, n_head * head, bias=bias, prefix=f"{prefix}.q", **linear)
        self.kv = QKVParallelLinear(width, head, 0, n_kv_head, bias=bias, prefix=f"{prefix}.kv", **linear)
        self.output = RowParallelLinear(
            n_head * head, width, bias=shape["output_bias"], prefix=f"{prefix}.output", **linear
        )
        if shape["qk_norm"]:
            self.query_norm, self.key_norm = RMSNorm(head, eps), RMSNorm(head, eps)
        inner, bias = shape["intermediate_size"], shape["mlp_bias"]
        self.gate_up = MergedColumnParallelLinear(width, [inner] * 2, bias=bias, prefix=f"{prefix}.gate_up", **linear)
        self.down = RowParallelLinear(inner, width, bias=bias, prefix=f"{prefix}.down", **linear)
        self.activation = SiluAndMul()  # no other is exported
        self.rotary = get_rope(
            head, shape["max_positions"], is_neox_style=True, rope_parameters=shape["rope_parameters"]
        )
        n_ranks = vllm_config.parallel_config.tensor_parallel_size
        self.attention = Attention(
            n_head // n_ranks,
            head,
            head**-0.5,
            num_kv_heads=self.kv.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=None if self.is_exact else spire["window_tokens"] - 1,  # a token is none of them
            prefix=cache,
        )
        if self.is_exact:
            self.attention.sliding_window = None  # of the target's: sink tokens are never freed

    def forward(self, x: Tensor, memories: Tensor, positions: Tensor, ahead: Tensor) -> Tensor:
        """Run tokens x [n, D] at the positions `ahead` [n], given memories [n, D] at the positions before them."""
        return self.after_attention(x, self.attention(self.queries(x, ahead), *self.keys_values(memories, positions)))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return rotated queries [n, H E] of inputs x [n, D]."""
        return self._rotated(self.q(self.input_norm(x)), getattr(self, "query_norm", None), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [n, K E] of memories x [n, D]."""
        keys, values = self.kv(self.input_norm(x)).chunk(2, -1)
        return self._rotated(keys.contiguous(), getattr(self, "key_norm", None), positions), values.contiguous()

    def write(self, memories: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write K and V of memories [n, D] to their slots [n] of the cache, which is [blocks, K, tokens, 2 E].

        What has no slot, which is -1 then, goes to block 0, which vLLM gives to no text.
        """
        keys, values = (one.unflatten(-1, (-1, self.head_dim)) for one in self.keys_values(memories, positions))
        cache, slots = self.attention.kv_cache, slots.clamp_min(0)
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = torch.cat([keys, values], -1).to(cache.dtype)

    def exact(self, x: Tensor, positions: Tensor, table: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Run tokens x [m, D] at positions [m], which see the memories at `places` [m, S] of their texts.

        table: [m, blocks], the blocks of each text.
        mask: [m, S], or with one column more for the key of the token itself; it is added to scores.
        """
        cache = self.attention.kv_cache
        size = cache.shape[2]
        past = cache[table.gather(1, places // size).long(), :, places % size].to(x.dtype)  # [m, S, K, 2 E]
        if mask.shape[1] > places.shape[1]:
            own = [one.unflatten(-1, (-1, self.head_dim)) for one in self.keys_values(x, positions)]
            past = torch.cat([past, torch.cat(own, -1)[:, None]], 1)
        keys, values = past.transpose(1, 2).split(self.head_dim, -1)
        queries = self.queries(x, positions).view(len(x), keys.shape[1], -1, self.head_dim)  # [m, K, H / K, E]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None, None])
        return self.after_attention(x, attended.flatten(1))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.output(attended)
        return x + self.down(self.activation(self.gate_up(self.mlp_norm(x))))

    def _rotated(self, heads: Tensor, norm: RMSNorm | None, positions: Tensor) -> Tensor:
        if norm is not None:
            heads = norm(heads.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return self.rotary(positions, heads)[0]


class SpireModel(nn.Module):
    """Input, blocks and final norm. The proposer puts the target's embedding in the place of `embed_tokens`.

    Letters: n tokens, D width of the target, C blocks, P parts of a hidden state: C, one more with `previous_state`.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        facts = vllm_config.speculative_config.draft_model_config.hf_config.to_dict()
        self.facts, self.spire = facts, facts["spire"]
        shape = self.spire["shape"]
        width, n_tokens = shape["hidden_size"], shape["vocab_size"]
        self.width, self.n_blocks = width, len(self.spire["target_layers"])
        self.last_position = vllm_config.model_config.max_model_len - 1
        self.n_queries = vllm_config.speculative_config.num_speculative_tokens + 1
        self.embed_tokens = nn.Embedding(1, width)
        if self.spire["input"] == "projected":
            self.input = ReplicatedLinear(width, width, bias=False, return_bias=False)
        else:
            self.table = VocabParallelEmbedding(n_tokens, width, prefix=maybe_prefix(prefix, "table"))
        if self.spire["previous_state"]:
            self.previous = ReplicatedLinear(width, width, bias=False, return_bias=False)
        first = vllm_config.model_config.get_total_num_hidden_layers()  # caches are bound by the number in their names
        names = [[f"blocks.{i}", f"layers.{first + i}.self_attn.attn"] for i in range(self.n_blocks)]
        self.blocks = nn.ModuleList(
            SpireBlock(vllm_config, facts, *(maybe_prefix(prefix, name) for name in pair)) for pair in names
        )
        self.norm, self.target_norm = (RMSNorm(width, shape["rms_norm_eps"]) for _ in range(2))
        rows = (1 if self.spire["feedback"] == "shared" else self.n_blocks, self.n_blocks + 1)
        if self.spire["feedback"]:
            self.feedback_weight = nn.Parameter(torch.empty(rows), requires_grad=False)
        self.target_rows = nn.Parameter(torch.empty(facts["target"]["rows"], width), requires_grad=False)

    def forward(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens [n] that follow `positions` [n], where the hidden states are [n, P D].

        Returns:
            The final states [n, D], and what is handed on: [n, P D].
        """
        parts, x = hidden_states.split(self.width, -1), self.first(input_ids, hidden_states)
        ahead, states = (positions + 1).clamp(max=self.last_position), [x]
        for block, memories in zip(self.blocks, parts, strict=False):
            states.append(block(states[-1], memories, positions, ahead))
        return self.results(states)

    def first(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the inputs [n, D] of the first block."""
        x = self.input(self.embed_tokens(input_ids)) if hasattr(self, "input") else self.table(input_ids)
        return x + self.previous(hidden_states[:, -self.width :]) if self.spire["previous_state"] else x

    def results(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, of the states of all layers, [n, D] each."""
        last = self.norm(states[-1])
        memories = states[: self.n_blocks]
        if self.spire["feedback"]:
            shares = self.feedback_weight.softmax(-1).expand(self.n_blocks, -1)
            memories = torch.einsum("il,lnd->ind", shares, torch.stack(states)).unbind()
        return last, torch.cat([*memories, *[last] * self.spire["previous_state"]], -1)

    def exact(self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same, but for the tokens alone after which a draft can begin; other results are 0."""
        context = get_forward_context()
        final, onward = hidden_states.new_zeros(len(positions), self.width), torch.zeros_like(hidden_states)
        if context.attn_metadata is None:  # a dummy run
            return final, onward
        name = self.blocks[0].attention.layer_name
        metadata, slots = context.attn_metadata[name], context.slot_mapping[name]
        for block, memories in zip(self.blocks, hidden_states.split(self.width, -1), strict=False):
            block.write(memories, positions, slots)
        rows = last_rows(metadata.query_start_loc, min(self.n_queries, metadata.max_query_len), len(positions))
        places, seen = self.window(positions[rows])  # [R, Q, S]
        table = metadata.block_table[:, None].expand(-1, rows.shape[1], -1).flatten(0, 1)  # [m = R Q, blocks]
        places, seen, rows = places.flatten(0, 1), seen.flatten(0, 1), rows.flatten()
        ahead = (positions[rows] + 1).clamp(max=self.last_position)  # nothing drafted behind it is kept
        states = [self.first(input_ids[rows], hidden_states[rows])]
        mask = hidden_states.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        for block in self.blocks:
            states.append(block.exact(states[-1], ahead, table, places, mask))
        final[rows], onward[rows] = self.results(states)
        return final, onward

    def window(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the token after each position sees: sink tokens, memories of the window, and its own key.

        Returns:
            The positions of the memories [.., S], and whether each is seen, [.., S or S + 1], the own key the last.
        """
        n_sinks, at = self.spire["sink_tokens"], positions[..., None]
        sinks = torch.arange(n_sinks, device=at.device).expand(*positions.shape, -1)
        near = at - torch.arange(self.spire["window_tokens"] - 1, device=at.device)
        own = torch.ones_like(at, dtype=torch.bool)[..., : int(self.spire["own_key"])]
        return torch.cat([sinks, near], -1).clamp_min(0), torch.cat([sinks <= at, near >= n_sinks, own], -1)

    def __setattr__(self, name: str, value: object) -> None:
        """Compare the target's embedding with that of training, at the moment at which the proposer hands it over."""
        super().__setattr__(name, value)
        if name == "embed_tokens" and hasattr(self, "target_rows") and get_tensor_model_parallel_rank() == 0:
            rows, table = self.target_rows, getattr(value, "weight", None)
            is_plain = table is not None and table.is_floating_point()
            # As bfloat16 would compare them: the dtype of a training or of an engine may have rounded either.
            if is_plain and not torch.allclose(table[: len(rows)].float(), rows.float(), 2**-7, 2**-14):
                target = self.facts["target"]
                refuse(
                    f"the drafter was trained for {target['name']} ({target['fingerprint']}), and the embedding of the "
                    "model that is served is another one; serve that target, or train a drafter for this one"
                )


def last_rows(starts: Tensor, n_last: int, n_tokens: int) -> Tensor:
    """Return which tokens of a step are the last ones of each request, [R, n_last] int64, given their starts [R + 1].

    Where a request has fewer tokens, its first one is repeated.
    """
    back = torch.arange(n_last, device=starts.device)
    return (starts[1:, None] - 1 - back).maximum(starts[:-1, None]).clamp(max=n_tokens - 1).long()


class SpireLlamaEagle3(Eagle3LlamaForCausalLM):
    """The drafter as the proposer sees it. V1 asks for a class of vLLM's own, of which the logits alone are used."""

    has_own_embed_tokens = False  # the proposer shares the target's
    use_parallel_drafting = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        facts = self.config.to_dict()
        check_fits(facts, vllm_config)
        warn_if_samples_are_wrong()
        spire = self.spire = facts["spire"]
        width, n_tokens = spire["shape"]["hidden_size"], spire["shape"]["vocab_size"]
        self.config.draft_vocab_size = spire["draft_vocab"] or n_tokens
        self.model = SpireModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        attention = self.model.blocks[0].attention
        backend, is_quantized = attention.attn_backend.get_name(), attention.kv_cache_torch_dtype.itemsize == 1
        if facts["attention"] == "exact" and (backend not in READ_BY_EXACT or is_quantized):
            refuse(
                f"attention=exact runs with {' and '.join(READ_BY_EXACT)} and a plain KV cache, not with {backend} and "
                f"kv_cache_dtype={attention.kv_cache_dtype}; serve with other ones, or export with attention=stock"
            )
        self.has_own_lm_head = spire["unembedding"] == "trained"
        self.logits_processor = LogitsProcessor(self.config.draft_vocab_size)
        self.draft_id_to_target_id = None
        if spire["draft_vocab"]:
            ids = torch.zeros(spire["draft_vocab"], dtype=torch.long)
            self.draft_id_to_target_id = nn.Parameter(ids, requires_grad=False)
        if self.has_own_lm_head:
            self.lm_head = ParallelLMHead(self.config.draft_vocab_size, width, prefix=maybe_prefix(prefix, "lm_head"))
        elif spire["draft_vocab"]:
            self.kept_head = ParallelLMHead(spire["draft_vocab"], width, prefix=maybe_prefix(prefix, "kept_head"))
        # Ids of the target's states, as vLLM counts them: i is the input of block i, and their number the final state.
        self.final = vllm_config.model_config.get_total_num_hidden_layers()
        self.given = self.config.eagle_aux_hidden_state_layer_ids
        read = [*spire["target_layers"], *[FINAL] * spire["previous_state"]]
        self.read = [self.final if layer == FINAL else layer for layer in read]

    def embed_input_ids(self, input_ids: Tensor, *_: object) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        run = self.model.exact if self.config.attention == "exact" else self.model
        return run(input_ids, positions, hidden_states)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Return the memories and the final state [n, P D] of the target's states [n, D of each id]."""
        parts = dict(zip(self.given, hidden_states.split(self.model.width, -1), strict=True))
        if self.final in parts:
            parts[self.final] = self.model.target_norm(parts[self.final].contiguous())
        return torch.cat([parts[layer] for layer in self.read], -1)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the tensors of an export. Returns the names of what has its value."""
        parameters, loaded = dict(self.named_parameters()), {"model.embed_tokens.weight", "kept_head.weight"}
        anew = "copy the drafter's folder again, or write it anew with spectrain export drafter=..."
        try:
            for name, tensor in weights:
                for own, part, *shard in self.parts_of(name, tensor):
                    load = getattr(parameters[own], "weight_loader", default_weight_loader)
                    load(parameters[own], part, *shard)
                    loaded.add(own)
        except SafetensorError as error:
            refuse(f"a file of the drafter is damaged ({error}); {anew}")
        if missing := sorted(parameters.keys() - loaded):
            refuse(f"the drafter's files lack {', '.join(missing)}; {anew}")
        return loaded

    def parts_of(self, name: str, tensor: Tensor) -> list[tuple]:
        """Return where a tensor of an export goes: names of parameters, parts of the tensor, and their shard if any."""
        shape, own = self.spire["shape"], f"model.{name}"
        if ".qkv." in name:
            head, n_head, n_kv_head = (shape[size] for size in ("head_dim", "n_head", "n_kv_head"))
            q, k, v = tensor.split([n_head * head, n_kv_head * head, n_kv_head * head])
            of_memories = own.replace(".qkv.", ".kv.")
            return [(own.replace(".qkv.", ".q."), q), (of_memories, k, "k"), (of_memories, v, "v")]
        if ".gate_up." in name:
            return [(own, part, i) for i, part in enumerate(tensor.chunk(2))]
        if name == "embed_tokens.weight":
            has_one_table = self.spire["input"] == "tied" and shape["tie_embeddings"]
            return [("model.table.weight", tensor), *[("lm_head.weight", tensor)] * has_one_table]
        if name == "kept":
            return [("draft_id_to_target_id", tensor - torch.arange(len(tensor), device=tensor.device))]
        others = {"lm_head.weight": "lm_head.weight", "target.norm": "model.target_norm.weight"}
        return [((others | {"target.embedding": "model.target_rows"}).get(name, own), tensor)]

    def __setattr__(self, name: str, value: object) -> None:
        """Take of the target's unembedding the rows of the tokens that can be drafted, when it is handed over."""
        if name == "lm_head" and hasattr(self, "kept_head"):
            value = self.kept_rows(value)
        super().__setattr__(name, value)

    def kept_rows(self, head: ParallelLMHead) -> ParallelLMHead:
        kept, weight = self.draft_id_to_target_id, getattr(head, "weight", None)
        if weight is None or not weight.is_floating_point():
            refuse(
                "draft_vocab needs the target's unembedding, which is quantized here; serve the target with a plain one"
            )
        kept = (kept + torch.arange(len(kept), device=kept.device)) - head.shard_indices.org_vocab_start_index
        is_here = (kept >= 0) & (kept < head.shard_indices.num_org_elements)
        rows = weight[kept.clamp(0, len(weight) - 1)] * is_here[:, None]  # each rank has those of some tokens
        own = self.kept_head
        own.weight_loader(own.weight, tensor_model_parallel_all_reduce(rows))
        own.quant_method.process_weights_after_loading(own)
        return own
