"""Folders of drafters that other projects write, and ours in their layouts: what all kinds share."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from spectrain.errors import UserError, shown
from spectrain.models.artifacts import MANIFEST, WEIGHTS, check_artifact, damage_of
from spectrain.models.drafter_model import DrafterModel, FusingDrafter
from spectrain.stores.files import load_json, write_json, write_whole
from spectrain.target.fingerprint import fingerprint
from spectrain.target.lean import LLAMA_LIKE, MATRICES, NORMS, ROPE_TYPES, block_state
from spectrain.target.llama import LlamaShape
from spectrain.target.loading import check_complete, check_finite, fetched
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

KEPT = "kept.npy"  # the tokens that it can draft in our own order, the most frequent first; engines pass over it
PICKLED = "pytorch_model.bin"
NOT_READ = r"^verifier_|rotary_emb\."  # of the target, for training; or computed
SIZES = {  # config.json -> fields of `LlamaShape`
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "hidden_act": "hidden_act",
    "max_position_embeddings": "max_positions",
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
OPTIONAL = {  # fields of `LlamaShape`, by a tensor of a block that is there where they are true
    "qkv_bias": "self_attn.q_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.gate_proj.bias",
    "qk_norm": "self_attn.q_norm.weight",
}

Opened = TypeVar("Opened", bound=FusingDrafter)
Read = tuple[dict, dict[str, Tensor]]  # fields of a config, and a state


@dataclass(frozen=True)
class Published:
    """The folder of a drafter while it is read. For `block` see `write`."""

    folder: Path
    given: str  # it, as messages name it
    target: TargetModel  # it drafts for
    facts: dict  # of its config.json
    tensors: dict[str, Tensor]
    guesses: list[str]  # what it does not say, and how it is read

    @property
    def is_own(self) -> bool:
        """Whether we have written it."""
        return (self.folder / MANIFEST).is_file()

    @property
    def layer(self) -> dict:
        """The facts of its blocks."""
        return self.facts.get("transformer_layer_config", self.facts)

    def without_embedding(self) -> Published:
        """Return it without an embedding that is the target's own, which is read instead."""
        own, left = self.target.model.get_input_embeddings().weight, dict(self.tensors)
        found = left.get("embed_tokens.weight")
        if found is not None and (own.is_meta or torch.equal(found.to(own), own)):
            del left["embed_tokens.weight"]
        return replace(self, tensors=left)

    def layers(self, named: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks whose inputs are read, in order. Raise UserError where the target has no such one."""
        if not named:
            named = default
            self.guesses.append(f"it names no layers, so it reads the inputs of blocks {named}")
        n_layer = self.target.n_layer
        if wrong := [layer for layer in named if not 0 <= layer < n_layer]:
            raise UserError(
                f"{self.given} reads the input of block {wrong[0]} (the output of block {wrong[0] - 1}), but only "
                f"those of blocks 0 to {n_layer - 1} of this target can be read; give one made for this target"
            )
        return tuple(sorted(set(named)))  # as vLLM does

    def shape(self, block: str) -> LlamaShape:
        """Return the dimensions of its blocks. Raise UserError where they are not for this target."""
        layer, target, given = self.layer, self.target, self.given
        family = layer.get("model_type")
        known = {key: layer[key] for key in (*SIZES, *ROPE) if layer.get(key) is not None}
        said = AutoConfig.for_model(family if family in LLAMA_LIKE else "llama", **known)
        rope, longest = dict(said.rope_parameters), target.max_positions
        if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
            raise UserError(f"{given} has a RoPE of type {shown(kind)}; drafters support {', '.join(ROPE_TYPES)}")
        of_target = (getattr(target.model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_theta")
        is_said = "rope_theta" in known or "rope_theta" in known.get("rope_parameters", {})
        if not is_said and of_target != rope["rope_theta"]:  # trainers that do not write it take the default
            self.guesses.append(f"it has no rope_theta, so {rope['rope_theta']:g} is read; the target has {of_target}")
        sizes = {ours: getattr(said, theirs) for theirs, ours in SIZES.items()}
        sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["n_head"]
        if not self.is_own:  # engines serve it up to the length of the target
            sizes["max_positions"] = max(sizes["max_positions"], longest)
        n_tokens, width = target.model.get_input_embeddings().weight.shape
        if (sizes["vocab_size"], sizes["hidden_size"]) != (n_tokens, width):
            of_drafter = f"{sizes['vocab_size']} tokens and states of {sizes['hidden_size']}"
            raise UserError(
                f"{given} is for a target of {of_drafter}, not of {n_tokens} and {width}; give one made for this target"
            )
        has = {name: f"{block.format(0)}{tensor}" in self.tensors for name, tensor in OPTIONAL.items()}
        return LlamaShape(**sizes, rope_parameters=rope, tie_embeddings=False, **has)

    def state(self, block: str, vocab_size: int) -> tuple[dict, dict[str, Tensor]]:
        """Return `draft_vocab` and `unembedding` of the config, and the state, with `kept` where it has a vocabulary.

        It has no lm_head where our own config.json says that it is the target's.
        """
        kept = self._kept(vocab_size)
        state = _our_names({name: one for name, one in self.tensors.items() if name not in ("d2t", "t2d")}, block)
        if kept is not None:
            state["kept"], head = kept, state.get("lm_head.weight")
            if (self.folder / KEPT).is_file():
                with damage_of(self.given, f"{KEPT}: "):
                    state["kept"] = torch.from_numpy(np.load(self.folder / KEPT))
                if not torch.equal(state["kept"].sort().values, kept):
                    raise UserError(f"{self.given} has other tokens in {KEPT} than in d2t; export it again")
                if head is not None:
                    state["lm_head.weight"] = head[torch.searchsorted(kept, state["kept"])]
        if self.facts.get("unembedding") == "target":
            state.pop("lm_head.weight", None)
        unembedding = "trained" if "lm_head.weight" in state else "target"
        return {"draft_vocab": None if kept is None else len(kept), "unembedding": unembedding}, state

    def _kept(self, vocab_size: int) -> Tensor | None:
        """Return the tokens [K] int64 that it can draft, in the order of its lm_head; None: all.

        `d2t` holds what is added to a row's number. Where that leaves the vocabulary, or marks others than `t2d`, they
        may be the tokens themselves.
        """
        map_, marks, head = (self.tensors.get(name) for name in ("d2t", "t2d", "lm_head.weight"))
        lengths = (len(one) for one in (map_, head) if one is not None)
        n_kept = self.facts.get("draft_vocab_size") or next(lengths, vocab_size)
        if n_kept == vocab_size:
            return None
        marked = None if marks is None else marks.nonzero()[:, 0]
        if map_ is None:
            if marked is None or len(marked) != n_kept:
                raise UserError(f"{self.given} drafts {n_kept} of {vocab_size} tokens, and has no d2t that says which")
            self.guesses.append("it has no d2t, so its tokens are those of t2d")
            return marked
        readings = {"offsets": map_.long() + torch.arange(len(map_)), "tokens": map_.long()}
        readings = {name: ids for name, ids in readings.items() if _is_map(ids, n_kept, vocab_size)}
        agrees = {name: marked is not None and torch.equal(ids.sort().values, marked) for name, ids in readings.items()}
        if not readings:
            what = f"a d2t that is no map of {n_kept} rows to {vocab_size} tokens"
            raise UserError(f"{self.given} has {what}; fetch it again")
        name = next((name for name in readings if agrees[name]), next(iter(readings)))
        if name == "tokens":
            self.guesses.append("d2t holds the tokens themselves, not offsets, which engines would add")
        if marked is not None and not agrees[name]:
            self.guesses.append("t2d marks other tokens than d2t, which is read")
        return readings[name]


def opened(
    kind: str, folder: Path, target: TargetModel, option: str, reader: Callable[[Published], Read], made: type[Opened]
) -> Opened:
    """Open a drafter of a kind in float32, which shares the target's tables.

    `folder` is an export, the folder of another project, or a Hugging Face id of one, and was given by `option`. Raise
    UserError where it does not fit the target, or is damaged. For `reader` see `read`.
    """
    given, folder = f"{option}={folder}", fetched(folder, option)
    if (folder / MANIFEST).is_file() or not (folder / "config.json").is_file():
        check_artifact(folder, kind, fingerprint(target.model, target.tokenizer), option)
    options, state = read(reader, folder, given, target)
    try:
        drafter = made(made.config_type(**options), target)
    except UserError as error:
        raise UserError(f"{given} cannot be used: {error}") from None
    own = drafter.state_dict()
    wrong = [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
    found = {"missing_keys": own.keys() - state.keys(), "unexpected_keys": state.keys() - own.keys()}
    check_complete(given, found | {"mismatched_keys": wrong})
    drafter.load_state_dict(state)
    check_finite(drafter, given)
    return drafter


def write(folder: Path, drafter: DrafterModel, dtype: torch.dtype, block: str, blocks: Mapping, own: Mapping) -> None:
    """Fill an existing folder with config.json, the weights, and our order of the tokens that it can draft.

    The target's tables are left out, but for the rows of its unembedding that `draft_vocab` keeps. `block` is the
    prefix of the tensors of a block, with {} for its number, `blocks` the beginning of config.json, see `blocks_json`,
    and `own` what config.json says of this kind alone.
    """
    state, shape, tables = drafter.state_dict(), drafter.config.shape, drafter.tables
    kept = state.pop("kept", None)
    if kept is not None:
        ids, order = kept.sort()
        state["lm_head.weight"] = drafter.unembedding.detach()[order]
        write_whole(folder / KEPT, lambda out: np.save(out, kept.cpu().numpy()))
    tensors = {name: tensor.to(dtype) for name, tensor in _their_names(state, shape, block).items()}
    if kept is not None:
        is_kept = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_kept[ids.cpu()] = True
        tensors |= {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": is_kept}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    facts = {**blocks, "torch_dtype": str(dtype).removeprefix("torch."), **own}
    if "lm_head.weight" in tensors:
        facts["draft_vocab_size"] = drafter.config.draft_vocab or shape.vocab_size
    if tables is not None:  # which tokens of the target begin and end texts
        known = tables.target.model.config.get_text_config()
        facts |= {name: getattr(known, name) for name in ("bos_token_id", "eos_token_id")}
    write_json(folder / "config.json", facts | {"unembedding": drafter.config.unembedding})


def blocks_json(architecture: str, shape: LlamaShape, family: str, n_layer: int) -> dict:
    """Return the part of config.json that describes the blocks."""
    rope = dict(shape.rope_parameters)
    theta, is_scaled = rope.pop("rope_theta"), rope.get("rope_type", "default") != "default"
    return {
        "architectures": [architecture],
        "model_type": family,
        **{theirs: getattr(shape, ours) for theirs, ours in SIZES.items()},
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_theta": theta,
        **({"rope_scaling": rope} if is_scaled else {}),
        "num_hidden_layers": n_layer,
        "tie_word_embeddings": False,
    }


def read(reader: Callable[[Published], Read], folder: Path, given: str, target: TargetModel) -> Read:
    """Return what the `reader` of a kind does, of a folder of ours or of another project, which messages call `given`.

    Raise UserError where it holds something else, or does not fit the target, or is damaged.
    """
    with damage_of(given, "config.json: "):
        facts = dict(load_json(folder / "config.json"))
    tensors = {name: one for name, one in _tensors(folder, given).items() if not re.search(NOT_READ, name)}
    published = Published(folder, given, target, facts, tensors, [])
    try:
        found = reader(published)
    except UserError:
        raise
    except Exception as error:  # a value of another type, for which each library has its own
        what = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{given} has a config.json that cannot be read ({shown(what)}); fetch it again") from error
    if published.guesses and not published.is_own:
        log.warning("%s does not say all, and is read so: %s", given, "; ".join(published.guesses))
    return found


def is_dflash(facts: Mapping) -> bool:
    """Return whether a config.json is of a DFlash drafter."""
    return "dflash" in (said := types_of(facts)) or ("dflash_config" in facts and "dspark" not in said)


def types_of(facts: Mapping) -> str:
    """Return what a config.json calls itself, in small letters."""
    said = [facts.get(key) for key in ("speculators_model_type", "architectures", "model_type")]
    return " ".join(map(str, said)).lower()


def _tensors(folder: Path, given: str) -> dict[str, Tensor]:
    """Return the tensors of one file, of several with an index, or of a pickled one, from which nothing is run."""
    index, found = folder / f"{WEIGHTS}.index.json", {}
    if (folder / WEIGHTS).is_file() or index.is_file() or not (folder / PICKLED).is_file():
        with damage_of(given):
            names = [WEIGHTS] if (folder / WEIGHTS).is_file() else {*load_json(index)["weight_map"].values()}
            for name in sorted(names):
                found |= load_file(folder / name)
        return found
    try:
        found = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
        if all(isinstance(one, Tensor) for one in found.values()):
            return found
        why = "not a mapping of tensors"
    except Exception as error:
        why = type(error).__name__
    raise UserError(f"{given} has a {PICKLED} that holds more than tensors ({why}); give one with {WEIGHTS}")


def _is_map(ids: Tensor, n_kept: int, vocab_size: int) -> bool:
    is_inside = ids.dim() == 1 and len(ids) == n_kept and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return is_inside and len(ids.unique()) == n_kept


def _their_names(state: Mapping[str, Tensor], shape: LlamaShape, block: str) -> dict[str, Tensor]:
    """Return a drafter's state under the names of the layout, whose projections are apart."""
    heads, tensors = [shape.n_head, shape.n_kv_head, shape.n_kv_head], {}
    parts = {"qkv": [n * shape.head_dim for n in heads], "gate_up": 2 * [shape.intermediate_size]}
    for name, tensor in state.items():
        of_block = re.fullmatch(r"blocks\.(\d+)\.(\w+)\.(\w+)", name)
        if of_block is None:
            tensors[name.replace("states_norm.", "input_norm.").replace("state_norms.", "fc_norm.")] = tensor
            continue
        number, within, kind = of_block.groups()
        if within in MATRICES:
            split = zip(MATRICES[within], tensor.split(parts.get(within, len(tensor))), strict=True)
            tensors |= {f"{block.format(number)}{theirs}.{kind}": part for theirs, part in split}
        else:
            tensors[f"{block.format(number)}{NORMS.get(within, within)}.{kind}"] = tensor
    return tensors


def _our_names(tensors: Mapping[str, Tensor], block: str) -> dict[str, Tensor]:
    """Return the tensors of the layout under the names of a drafter, whose projections are joined."""
    blocks, state = {}, {}
    of_block = re.compile(re.escape(block).replace(r"\{\}", r"(\d+)"))
    for name, one in tensors.items():
        if found := of_block.match(name):
            number = found.group(1) if of_block.groups else "0"
            blocks.setdefault(number, {})[name.removeprefix(found.group())] = one
        else:
            state[name.replace("input_norm.", "states_norm.").replace("fc_norm.", "state_norms.")] = one
    joined = ((number, block_state(of_one)) for number, of_one in blocks.items())
    return state | {f"blocks.{number}.{name}": one for number, of_one in joined for name, one in of_one.items()}
