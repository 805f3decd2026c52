"""The SPIRe drafter (Neelam et al. 2025, section 3): sparse KV, pruned initialisation, recurrent feedback.

A stack of the target's own blocks that attends to *memories*. The memory of a context token is the target's activation
(the input of the target block that the draft block was copied from), so context costs K/V projections only. The memory
of a drafted token is a learned mix of the draft's own activations,

    m_t^i = sum_l softmax(w_i)_l x_t^l,   l = 0 (embedding) .. n_layer.

The first block reads W e(token) of a token (`input=projected`): e is the target's own embedding, and W brings it to
where the target's own input of that block lies. A raw embedding is some ninety times too small for a late block.

Attention is sparse: the first `sink_tokens` positions and the last `window_tokens` (t - window + 1 .. t), in training
(`spectrain.models.rollout`) as in decoding (`spectrain.methods.spire`); both go through `LlamaBlock.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.artifacts import WEIGHTS, check_artifact, damage_of
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.kinds import Kind
from spectrain.stores.files import read_object, write_json
from spectrain.target.fingerprint import fingerprint
from spectrain.target.llama import KeysValues, LlamaBlock, LlamaShape
from spectrain.target.loading import check_finite
from spectrain.target.target import FINAL, TargetModel

KIND = Kind(
    *("drafter", "spire drafter", "spectrain.train +exp=spire"),
    method="spire",
    about="A SPIRe drafter: it reads the target's own activations of the text and a sparse window of its KV cache, and "
    "drafts a chain of tokens for the target to verify.",
    auto={"spire_sssd": ("sssd", "logitspec"), "spire": ()},
    engine="vllm_folder",
)


@dataclass(frozen=True)
class SpireConfig:
    """The options of a drafter, saved as `config.json` beside its weights. The defaults are the paper's."""

    shape: LlamaShape  # of the target
    target_layers: tuple[int, ...]  # of the target, whose inputs are the memories of each draft block; or FINAL
    k: int = 4  # draft tokens of a training rollout, and the default draft length
    window_tokens: int = 64  # a query at t sees positions t - window + 1 .. t
    sink_tokens: int = 1  # first positions of the text, always seen
    # Memories of drafted tokens mix all layers, "shared": alike; False: a block's own input.
    feedback: bool | str = True
    target_activations: bool = True  # memories of context tokens are the target's; False: the drafter reads the context
    # Input of the first block. projected: W e(token), with the target's embedding e. trained: a table of its own. tied:
    # a table of its own, which is also the unembedding if the target has one table for both.
    input: str = "tied"  # projected | trained | tied
    unembedding: str = "trained"  # target: the target's unembedding; trained: one of its own, as it is with input=tied
    # Whether the first block's input also holds W2 h, h being the target's final state one token earlier, for drafted
    # tokens the drafter's own. Not in the paper; EAGLE does so.
    previous_state: bool = False
    # Whether a token sees its own key, besides those of the memories before it. Attention over one KV cache has no
    # place for it, so engines run a drafter as it was trained where this is false. See `sees_itself`.
    own_key: bool = True
    # Tokens that it can draft: fewer than the target has, whose probability is 0 for all others. None: all.
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.input == "tied" and self.unembedding == "target":
            raise UserError("input=tied trains its own unembedding; give unembedding=trained, or input=projected")
        if self.input == "tied" and self.shape.layer_types:
            raise UserError("input=tied cannot scale embeddings, as this target does; give input=projected or trained")
        if self.previous_state and (self.input == "tied" or not self.target_activations):
            raise UserError("previous_state=true needs input=projected or trained, and target_activations=true")
        if self.draft_vocab is not None and self.input == "tied":
            raise UserError("draft_vocab needs input=projected or trained: a tied table has all tokens")
        if self.k > self.window_tokens:
            raise UserError(f"k={self.k} is larger than window_tokens={self.window_tokens}; raise it, or lower k")
        if not self.own_key and not self.target_activations:
            raise UserError("own_key=false needs target_activations=true: without, no key is a memory")
        if not self.own_key and self.window_tokens < 2:
            raise UserError("own_key=false needs window_tokens of 2 or more: one is the token itself")
        if self.feedback and not self.target_activations:
            raise UserError("target_activations=false needs feedback=false, or the context is read token by token")

    @property
    def n_layer(self) -> int:
        return len(self.target_layers)

    @property
    def block_layers(self) -> tuple[int, ...]:
        """Blocks of the target whose inputs the drafter reads."""
        return self.target_layers if self.target_activations else ()

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """The layers that `TargetModel` captures: the inputs of the blocks, and FINAL states at the end if needed."""
        return self.block_layers + (FINAL,) * self.previous_state

    def sees_itself(self, others: Tensor) -> Tensor:
        """Return whether each query sees its own key, [..] bool, given which other keys it sees, [.., S] bool.

        With own_key=false it does where it sees no other key: at the first position of a text.
        """
        return torch.ones_like(others[..., 0]) if self.own_key else ~others.any(dim=-1)

    @property
    def has_one_table(self) -> bool:
        """Whether the drafter's embedding is its unembedding, too."""
        return self.input == "tied" and self.shape.tie_embeddings


class SpireDrafter(DrafterModel):
    """Input, `n_layer` blocks, final norm, unembedding, and the feedback weights.

    The rollout that trains it is in `spectrain.models.rollout`.
    """

    FEEDBACK_START = 4.0  # softmax([4, 0, 0]) gives the block's own input 96 % of its memory at the start

    def __init__(self, config: SpireConfig, target: TargetModel | None = None) -> None:
        super().__init__()
        shape = config.shape
        if config.input == "projected":
            self.input = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)  # W
        else:
            self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        if config.previous_state:
            self.previous = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)  # W2
        self.blocks = nn.ModuleList(LlamaBlock(shape, layer) for layer in config.target_layers)
        self.add_output(config, target)
        if config.has_one_table:
            self.lm_head.weight = self.embed_tokens.weight
        if config.feedback:  # w [n_layer, n_layer + 1]; w[i, i] weighs block i's own input
            start = self.FEEDBACK_START * torch.eye(config.n_layer, config.n_layer + 1)
            start = torch.zeros(1, config.n_layer + 1) if config.feedback == "shared" else start  # [1, ..]: an even mix
            self.feedback_weight = nn.Parameter(start, requires_grad=config.k > 1)  # with k = 1 no memory is ever read

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what a token adds to the input x^0 of the first block, [.., D] for tokens [..] int64.

        It is in the dtype of the norms, and all of x^0 unless the drafter reads previous states.
        """
        if hasattr(self, "embed_tokens"):
            x = self.embed_tokens(tokens)
        else:
            x = self.input(F.embedding(tokens, self.tables.embedding).to(self.input.weight.dtype))
        return x.to(self.norm.weight.dtype)

    def joined(self, x: Tensor, previous: Tensor | None) -> Tensor:
        """Return the inputs x^0; `previous` is not read unless the config has `previous_state`."""
        return x + self.previous(previous.to(x.dtype)).to(x.dtype) if self.config.previous_state else x

    def memories(self, states: list[Tensor]) -> list[Tensor]:
        mixed = []
        for shares in self.feedback_shares():  # one by one: all products at once would take n_layer^2 times the memory
            memory = states[0] * shares[0]
            for state, share in zip(states[1:], shares[1:], strict=True):
                memory = memory + state * share  # not a matrix product, which autocast would round
            mixed.append(memory)
        return mixed

    def feedback_shares(self) -> Tensor:
        """Return what each layer's state has in the memories of each block, [n_layer, n_layer + 1]."""
        return self.feedback_weight.softmax(dim=-1).expand(self.config.n_layer, -1)

    def of_context(self, block: LlamaBlock, captured: Tensor, rope: tuple[Tensor, Tensor]) -> KeysValues:
        """Return K/V of the target's activations [B, L, D] for a block."""
        return block.keys_values(captured.to(self.norm.weight.dtype), rope)


def save(folder: Path, drafter: SpireDrafter, dtype: torch.dtype = torch.float32) -> None:
    """Write weights (tied ones once) and config into an existing folder. The target's tables are left out."""
    state = drafter.state_dict()
    state = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in state.items()}
    if drafter.config.has_one_table:
        del state["lm_head.weight"]
    save_file(state, folder / WEIGHTS)
    write_json(folder / "config.json", drafter.config)


def load(folder: Path, target: TargetModel, option: str = "drafter") -> SpireDrafter:
    """Open a SPIRe drafter in float32, which shares the target's tables. `option` is the one that it was given by.

    Raises:
        UserError: it does not fit the target, or is damaged.
    """
    given = f"{option}={folder}"
    check_artifact(folder, "spire", fingerprint(target.model, target.tokenizer), option)
    config = read_object(folder / "config.json", SpireConfig, "export it again")
    drafter = SpireDrafter(config, target)
    with damage_of(given):
        state = load_file(folder / WEIGHTS)
        if config.has_one_table:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        drafter.load_state_dict(state)
    check_finite(drafter, given)
    return drafter
