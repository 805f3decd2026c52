"""The EAGLE-3 drafter (Li et al. 2025): one block that reads the target's states of three layers, then its own states.

A token at position t is read as its embedding e_t beside a state g of position t - 1. In the context and at the root,
g = fc(the target's states of `target_layers`); for drafted tokens it is the drafter's own state. The block computes

    h_t = Block([norm(e_t); norm(g)]),   logits of token t + 1: lm_head(norm(h_t)),

and the next drafted token reads h_t as g. Only g is in the residual stream. With a single block, keys and values of the
context need no attention, so reading a prompt takes projections only, as with SPIRe.

Papers number a token by the position of the state beside it: their row p is our token at p + 1. Decoding does so, too,
and training numbers by token. Attention is relative, so both compute the same.

Training (the training-time test of section 3.2) drafts from many roots of a row at once, teacher forced. The i-th token
behind a root attends to the context up to its root, and to its own draft. See `unrolled`.

Folders: ours have config.json and tensors of `LlamaForCausalLMEagle3`, as SafeAILab and SpecForge name them, which vLLM
and SGLang load as they are. Automodel and speculators have other names and defaults for the same, and some folders do
not say all that it takes to compute as they were trained: each is read as its writer meant it, and what had to be
guessed is logged in one line.

Letters: as in docs/design.md; E width of a head, K key/value heads, R roots of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models import published
from spectrain.models.drafter_model import FusingConfig, FusingDrafter
from spectrain.models.kinds import Kind
from spectrain.models.published import ROPE, SIZES, Published, Read, blocks_json, is_dflash, opened, types_of
from spectrain.models.root_attention import attend
from spectrain.target.forward import DecoderProgram
from spectrain.target.llama import KeysValues, LlamaBlock
from spectrain.target.target import TargetModel

ARCHITECTURE = "LlamaForCausalLMEagle3"
BLOCK = "midlayer."
OTHER_NAMES = {  # of the same tensors in the folders of others
    r"^model\.": "",
    r"^layers\.0\.": BLOCK,
    "^aux_norm_low": "fc_norm.0",  # of an earlier SGLang
    "^aux_norm_mid": "fc_norm.1",
    "^aux_norm_high": "fc_norm.2",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_BLOCK = ("model_type", *SIZES, "attention_bias", "mlp_bias", *ROPE, "num_hidden_layers", "tie_word_embeddings")
LAYERS = "eagle_aux_hidden_state_layer_ids"
SIGNS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
OTHERS = {  # what a folder may hold instead, by words in its architectures, types, some keys, and names of tensors
    "P-EAGLE": r"peagle|mask_hidden|pard_token|ptd_token_id|parallel_drafting",
    "EAGLE-4": r"eagle-?4|efficient_lm_head",
    "DSpark": r"dspark|markov_|confidence_head",
    "DFlash": r"dflash",
    "Medusa": r"medusa|^\d+\.\d+\.(linear|weight)",
    "MTP": r"mtp|\beh_proj|\bnextn",
}
KEYS_OF_OTHERS = ("pard_token", "ptd_token_id", "parallel_drafting", "dflash_config", "medusa_num_heads")


def recognises(facts: Mapping) -> bool:
    """Return whether a config.json is of a drafter that stands on its target's states, of this kind or of `OTHERS`."""
    is_one = SIGNS & facts.keys() or re.search("eagle|dspark|medusa|mtp", types_of(facts))
    return bool(is_one) and not is_dflash(facts)


KIND = Kind(
    *("drafter", "EAGLE-3 drafter", "spectrain.train +exp=eagle3"),
    method="eagle3",
    about="An EAGLE-3 drafter: one block that reads the target's states of some layers beside the embedding of each "
    "token, and its own states as it drafts.",
    auto={"eagle3_sssd": ("sssd", "logitspec"), "eagle3": ()},
    engine="eagle3",
    recognises=recognises,
    check="eagle3",
)


@dataclass(frozen=True)
class Eagle3Config(FusingConfig):
    """Shape and options of an EAGLE-3 drafter. The flags have the names that published checkpoints give them."""

    k: int = 4  # draft tokens that it is trained for, and the default draft length
    window_tokens: int | None = None  # a query at t sees positions t - window + 1 .. t; None: all
    draft_vocab: int | None = None  # tokens that it can draft; None: all
    unembedding: str = "trained"  # target: the target's rows of these tokens; trained: its own
    own_embedding: bool = False  # whether its checkpoint has an embedding; else the target's is read
    norm_before_residual: bool = False  # whether the residual stream begins with the normed g
    norm_before_fc: bool = False  # one norm over all states of the target
    fc_norm: bool = False  # one norm for each of them (EAGLE-3.1)
    norm_output: bool = False  # whether the next token reads norm(h) in place of h

    n_layer, previous_state = 1, True

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm exclude each other; give one of them")
        super().__post_init__()
        if self.window_tokens is None:
            object.__setattr__(self, "window_tokens", self.shape.max_positions)
        if self.k > self.window_tokens:
            raise UserError(
                f"window_tokens={self.window_tokens} is shorter than drafts of {self.k} tokens; raise it, or "
                "lower ttt_steps"
            )

    @property
    def is_windowed(self) -> bool:
        return self.window_tokens < self.shape.max_positions


class Eagle3Block(LlamaBlock):
    """A block whose inputs [.., 2 D] are an embedding and a state side by side, and whose outputs are a state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config.shape)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.shape.hidden_size, config.shape.rms_norm_eps)
        self.qkv = nn.Linear(2 * self.qkv.in_features, self.qkv.out_features, bias=config.shape.qkv_bias)

    def normed(self, x: Tensor) -> Tensor:
        embedded, state = x.chunk(2, dim=-1)
        return torch.cat([self.input_norm(embedded), self.hidden_norm(state)], dim=-1)

    def residual(self, x: Tensor) -> Tensor:
        state = x.chunk(2, dim=-1)[1]
        return self.hidden_norm(state) if self.norm_before_residual else state

    def append_normed(self, program: DecoderProgram, embedded: Tensor, state: Tensor) -> Tensor:
        """Append `normed` of embeddings and states [M, D] to a program. Return where it writes it, [M, 2 D]."""
        d = state.shape[1]
        both = program.floats(len(state), 2 * d)
        program.goes_on(program.norm(embedded, None, self.input_norm.weight, both[:, :d]))
        program.norm(state, None, self.hidden_norm.weight, both[:, d:])
        return both

    def append_residual(self, program: DecoderProgram, state: Tensor, x: Tensor) -> None:
        """Append `residual` of states [M, D], written to x [M, D], which may be the same."""
        if self.norm_before_residual:
            program.norm(state, None, self.hidden_norm.weight, x)
        elif state is not x:
            program.copy(state, x)


class Eagle3Drafter(FusingDrafter):
    """Fusion of the target's states, one block, norm, unembedding.

    Its final states are what the next token reads; `norm_output` decides whether after the norm or before it.
    """

    config_type, pairs = Eagle3Config, True

    def __init__(self, config: Eagle3Config, target: TargetModel | None = None) -> None:
        super().__init__()
        shape, d, n_states = config.shape, config.shape.hidden_size, len(config.target_layers)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, d)
        if config.norm_before_fc:
            self.states_norm = nn.RMSNorm(n_states * d, shape.rms_norm_eps)
        if config.fc_norm:
            self.state_norms = nn.ModuleList(nn.RMSNorm(d, shape.rms_norm_eps) for _ in range(n_states))
        self.fc = nn.Linear(n_states * d, d, bias=False)
        self.blocks = nn.ModuleList([Eagle3Block(config)])
        self.add_output(config, target)

    @property
    def normed_states(self) -> bool:
        return self.config.norm_output

    def read_target(self, captured: Tensor, following: Tensor | None) -> tuple[list[Tensor], Tensor]:
        states = self.fused(captured)
        return [self.joined(self.embed(following), states)], states

    def fused(self, captured: Tensor) -> Tensor:
        """Return g [.., D] of the target's states [.., C, D] of `target_layers`."""
        states = captured.to(self.norm.weight.dtype)
        if self.config.fc_norm:
            states = torch.stack([norm(one) for norm, one in zip(self.state_norms, states.unbind(-2), strict=True)], -2)
        states = states.flatten(-2)
        return self.fc(self.states_norm(states) if self.config.norm_before_fc else states)

    def append_fused(self, program: DecoderProgram, captured: Tensor) -> Tensor:
        """Append `fused` of states [M, C D] to a program. Return where it writes it, [M, D]."""
        d = self.config.shape.hidden_size
        states, fused = captured, program.floats(len(captured), d)
        if self.config.fc_norm or self.config.norm_before_fc:
            states = program.floats(*captured.shape)
            norms, width = (self.state_norms, d) if self.config.fc_norm else ([self.states_norm], captured.shape[1])
            for norm, one, normed in zip(norms, captured.split(width, 1), states.split(width, 1), strict=True):
                program.norm(one, None, norm.weight, normed)
        program.linear(states, self.fc, fused)
        return fused

    def joined(self, x: Tensor, previous: Tensor | None) -> Tensor:
        """Return the block's inputs [.., 2 D]: embeddings, and the states g one position earlier."""
        return torch.cat([x, previous.to(x.dtype)], dim=-1)


def unrolled(
    drafter: Eagle3Drafter,
    tokens: Tensor,
    captured: Tensor,
    n_steps: int,
    every: int = 1,
    first_root: int = 0,
    starts: Tensor | None = None,
    drafted: Tensor | None = None,
) -> list[Tensor]:
    """Draft n_steps tokens from every `every`-th token of whole texts, teacher forced, as decoding does it.

    Args:
        drafter: the model.
        tokens: [B, L] int64.
        captured: [B, L, C, D] of the target on them.
        n_steps: of each draft.
        every: distance of two roots; 1 in the paper.
        first_root: position of the first root.
        starts: [B, L] int64, where in the row each token's document begins; None: a row is one document.
        drafted: [B, L] int64, what drafts read behind their roots in place of `tokens`; None: the same.

    Returns:
        For each step i the inputs [B, R, D] of the unembedding. Entry r belongs to the token at first_root + r * every
        + i and predicts the token after it. `drafted_places` says which entries mean nothing.
    """
    n_tokens, device = tokens.shape[1], tokens.device
    block, window = drafter.blocks[0], drafter.config.window_tokens
    embedded, rope = drafter.embed(tokens), drafter.rope(torch.arange(n_tokens, device=device)[None])
    before = F.pad(drafter.run(drafter.fused, captured)[:, :-1], (0, 0, 1, 0))  # of each token, g one position earlier
    context = drafter.run(block.keys_values, drafter.joined(embedded, before), rope)
    embedded = embedded if drafted is None else drafter.embed(drafted)
    roots = range(first_root, n_tokens, every)
    first = (torch.zeros_like(tokens[:1]) if starts is None else starts)[:, first_root::every] + 1
    state, own, found = before[:, first_root::every], [], []
    for i in range(n_steps):
        places = torch.arange(first_root + i, n_tokens + i, every, device=device).clamp_max(n_tokens - 1)
        x = drafter.joined(embedded[:, places], state)
        queries, keys_values = block.queries_keys_values(x, tuple(part[:, places] for part in rope))
        own.append(KeysValues(keys_values.keys[:, :, :, None], keys_values.values[:, :, :, None]))
        attended = attend(queries[:, :, :, None], context, own, roots, first, window - 1 - i)[:, :, 0]
        state = drafter.state_of(drafter.run(block.after_attention, x, attended))
        found.append(drafter.unembedded(state))
    return found


def load(folder: Path, target: TargetModel, option: str = "drafter") -> Eagle3Drafter:
    """Open an EAGLE-3 drafter, see `published.opened`."""
    return opened("eagle3", folder, target, option, read, Eagle3Drafter)


def default_layers(n_layer: int) -> tuple[int, ...]:
    """Return the blocks whose inputs the field reads of a target of so many blocks, where nothing else is said."""
    return tuple(sorted({2, n_layer // 2, n_layer - 3}))


def sglang_window(window_tokens: int) -> int:
    """Return the window as SGLang counts it for EAGLE-3 drafters: the tokens before a query that it sees."""
    return max(1, window_tokens - 1)  # it refuses 0


def save(folder: Path, drafter: Eagle3Drafter, dtype: torch.dtype = torch.float32) -> None:
    """Write a drafter into an existing folder, as vLLM and SGLang load it; see `published.write`."""
    config = drafter.config
    layers = list(config.target_layers)
    own = {
        "target_hidden_size": config.shape.hidden_size,
        "draft_vocab_size": None,  # where it has no lm_head; SGLang does not load a folder without this key
        **{flag: True for flag in FLAGS if getattr(config, flag)},
        **({} if len(layers) == 3 else {"num_aux_hidden_states": len(layers)}),
        # The inputs of these blocks, as vLLM counts, and the same states as outputs of blocks, as SGLang does.
        LAYERS: layers,
        "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "k": config.k,
        "window_tokens": config.window_tokens if config.is_windowed else None,
    }
    published.write(folder, drafter, dtype, BLOCK, blocks_json(ARCHITECTURE, config.shape, "llama", 1), own)


def read(found: Published) -> Read:
    """Return the fields of `Eagle3Config`, and the drafter's state."""
    facts, tensors, guesses = found.facts, found.tensors, found.guesses
    for theirs, ours in OTHER_NAMES.items():
        tensors = {re.sub(theirs, ours, name): one for name, one in tensors.items()}
    if (why := _why_not(facts, [*tensors])) is not None:
        raise UserError(f"{found.given} {why}")
    found, layer = replace(found, tensors=tensors), found.layer
    fields = {"shape": (shape := found.shape(BLOCK)), "target_layers": _layers(found)}
    fields |= _flags(facts, tensors, guesses)
    fields |= {name: facts[name] for name in ("k", "window_tokens") if name in facts}
    if methods := (facts.get("speculators_config") or {}).get("proposal_methods"):
        fields["k"] = methods[0]["speculative_tokens"]
    # speculators masks by a window, and vLLM's class for Qwen3; of the other folders nobody reads it.
    has_window = "speculators_model_type" in facts or "eagle3qwen3" in types_of(facts)
    if has_window and "sliding_attention" in (layer.get("layer_types") or ()):
        fields["window_tokens"] = layer["sliding_window"]
    found = found if found.is_own else found.without_embedding()
    tensors = found.tensors
    head, embedded = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if layer.get("tie_word_embeddings") and not found.is_own and head is not None:
        guesses.append("lm_head is read although tie_word_embeddings is true, for which SGLang reads the embedding")
    elif layer.get("tie_word_embeddings") and head is None and embedded is not None:
        tensors["lm_head.weight"] = embedded
    vocabulary, state = found.state(BLOCK, shape.vocab_size)
    if vocabulary["unembedding"] == "target":
        guesses.append("it has no lm_head, so the target's is read")
    return fields | vocabulary | {"own_embedding": "embed_tokens.weight" in state}, state


def _why_not(facts: Mapping, names: list[str]) -> str | None:
    """Return why a folder with tensors of these names is not read: it holds another kind, or is computed otherwise."""
    keys = [key for key in KEYS_OF_OTHERS if facts.get(key) not in (None, False)]
    said = [one.lower() for one in (types_of(facts), *keys, *names)]
    found = next((kind for kind, words in OTHERS.items() if any(re.search(words, one) for one in said)), None)
    has_fc, has_norm = "fc.weight" in names, f"{BLOCK}hidden_norm.weight" in names
    found = "EAGLE-1 or EAGLE-2" if found is None and has_fc and not has_norm else found
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    reads_states = (facts.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    reasons = {
        "is an EAGLE-3 drafter with latent attention (MLA); give one with a Llama block": re.search(
            "kv_[ab]_proj", " ".join(names)
        ),
        f"is a drafter of {found}, which is not read; give one of EAGLE-3": found,
        f"holds no EAGLE-3 drafter: it has no fc and {BLOCK}hidden_norm; give another folder": not (
            has_fc and has_norm
        ),
        f"has {1 + len(layers)} layers; only drafters of one layer are read": layers,
        "reads no states of layers (use_aux_hidden_state is false); give one that does": not reads_states,
        f"scales its logits by {(scale := facts.get('logit_scale', 1))}, which is not read; give another": scale != 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _layers(found: Published) -> tuple[int, ...]:
    """Return the blocks whose inputs it reads. vLLM's key names these, and that in `eagle_config` the outputs."""
    inputs, outputs = found.facts.get(LAYERS), (found.facts.get("eagle_config") or {}).get(LAYERS) or ()
    of_outputs = [layer + 1 for layer in outputs]
    if inputs and outputs and sorted(inputs) != sorted(of_outputs):
        found.guesses.append(f"{LAYERS} are {inputs}, as inputs of blocks, not {outputs} of eagle_config")
    d, n_columns = found.tensors["fc.weight"].shape
    layers = found.layers(inputs or of_outputs, default_layers(found.target.n_layer))
    if n_columns != len(layers) * d and not (inputs or outputs):  # as DeepSpec's, which have five
        states = f"{n_columns // d} states of the target, but its config.json does not say of which blocks"
        raise UserError(f"{found.given} reads {states}; write {LAYERS} as its training had them")
    return layers


def _flags(facts: Mapping, tensors: Mapping[str, Tensor], guesses: list[str]) -> dict[str, bool]:
    inside, is_speculators = facts.get("eagle_config") or {}, "speculators_model_type" in facts
    flags = {flag: bool(inside.get(flag, facts.get(flag, False))) for flag in FLAGS}
    flags["fc_norm"] |= bool(facts.get("use_aux_norm"))
    for flag, name in {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}.items():
        if name in tensors and not flags[flag]:
            flags[flag] = True
            guesses.append(f"{flag} is true, because it has {name}")
    if is_speculators and "norm_before_residual" not in facts:
        guesses.append("norm_before_residual is false, as where speculators reads it, and true in vLLM")
    if flags["norm_output"] and not is_speculators:
        guesses.append("norm_output feeds back the normed state, as engines do; SpecForge trains without")
    return flags
