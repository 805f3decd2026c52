"""A target on the lean decoder: which models it knows, how it shares their memory, and its forwards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.errors import UserError
from spectrain.kernels import ACTIVATIONS, MOST_TOKENS, Programs, outruns_torch, unique, why_no_kernels, works
from spectrain.target.forward import Forward, can_fuse
from spectrain.target.kv_cache import KVCache
from spectrain.target.llama import LlamaDecoder, LlamaShape, Rope
from spectrain.target.masks import Nodes
from spectrain.target.modules import addresses, describe, why_not_plain, window_of
from spectrain.target.weights import Int8Linear, RowsLinear, TextLinear, is_emulated, on_cpu, version

PIECE_STEP = 8  # a piece of a prompt has a multiple of so many tokens, because each number takes a program of its own
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # others scale, soft-cap or norm in ways the block does not have
DRAFTED_FOR = (*LLAMA_LIKE, "gemma3_text")  # whose blocks a drafter of ours can have
MOST_WIDTH = 256  # of a head, for our own kernels on a GPU
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of others the frequencies change with the length of the text
MATRICES = {  # of a block: our names -> Hugging Face's, whose rows stand one below the other
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = {
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
GEMMA_NORMS = NORMS | {  # which multiply by 1 + weight
    "attended_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "added_norm": "post_feedforward_layernorm",
}


def shape_of(model: PreTrainedModel) -> LlamaShape:
    """Return the dimensions of a Llama-like model. Raise UserError for another one."""
    config = model.config
    if (family := config.model_type) not in DRAFTED_FOR:
        known = ", ".join(DRAFTED_FOR)
        raise UserError(f"target of type {family} is not computed like Llama; give one of {known}, or +exp=vanilla")
    is_gemma = family not in LLAMA_LIKE
    for parameters in config.rope_parameters.values() if is_gemma else [config.rope_parameters]:
        if (rope := parameters.get("rope_type", "default")) not in ROPE_TYPES:
            raise UserError(f"the target's RoPE is of type {rope}; drafters support {', '.join(ROPE_TYPES)}")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_head=config.num_attention_heads,
        n_kv_head=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_activation if is_gemma else config.hidden_act,
        rope_parameters=dict(config.rope_parameters),
        max_positions=config.max_position_embeddings,
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        mlp_bias=mlp.gate_proj.bias is not None,
        qk_norm=hasattr(attention, "q_norm"),
        tie_embeddings=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        layer_types=tuple(config.layer_types) if is_gemma else (),
    )


def why_not_lean(model: PreTrainedModel) -> str | None:
    """Return why the lean decoder cannot run a model, or None where it can."""
    if (family := model.config.model_type) in DRAFTED_FOR and family not in LLAMA_LIKE:
        return f"{family} scales embeddings and norms what its blocks add"
    if family in LLAMA_LIKE and (why := why_not_plain(model)) is not None:
        return why
    try:
        shape_of(model)
    except UserError as error:
        return str(error).split(";")[0]
    if (window := window_of(model.config)) is not None:
        return f"its layers have a window of {window} tokens"
    weights = list(model.parameters())
    if len({weight.device for weight in weights}) > 1:
        return "its layers are spread over several devices"
    if any(type(weight) is not nn.Parameter or not weight.is_floating_point() for weight in weights):
        return "its weights are quantized, or divided among ranks"
    return None


def why_not_fused(shape: LlamaShape, device: torch.device) -> str | None:
    """Return why our own kernels cannot run such blocks on a device; None: they can."""
    if shape.hidden_act not in ACTIVATIONS:
        return f"they do not know the activation {shape.hidden_act}"
    if shape.layer_types or shape.head_dim % 2 or shape.head_dim > MOST_WIDTH:
        return f"they know neither Gemma's norms, nor heads of odd width or wider than {MOST_WIDTH}"
    return why_no_kernels(device)


def fused_kernels(shape: LlamaShape, device: torch.device) -> ModuleType | None:
    """Return the module `fused` where its kernels can run such blocks on a device."""
    if why_not_fused(shape, device) is not None:
        return None
    from spectrain.target import fused  # here: it imports Triton

    return fused


def block_state(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a Hugging Face block to that of a `LlamaBlock`. Loading fails if a tensor is left over."""
    left, state = dict(layer), {}
    is_gemma = "pre_feedforward_layernorm.weight" in layer
    norms = GEMMA_NORMS if is_gemma else NORMS
    for ours, theirs in (*MATRICES.items(), *((norm, (name,)) for norm, name in norms.items())):
        for kind in ("weight", "bias"):
            if found := [left.pop(f"{name}.{kind}") for name in theirs if f"{name}.{kind}" in left]:
                state[f"{ours}.{kind}"] = found[0].float() + 1 if is_gemma and ours in norms else _joined(found)
    return state | left


def lean_decoder(model: PreTrainedModel, dtype: torch.dtype) -> LlamaDecoder:
    """Return the lean decoder of a Hugging Face model, over the same memory. Raise UserError if it is not Llama-like.

    Matrices that the decoder joins become views of the joined one in the Hugging Face model, which goes on to work.
    Norms are in `dtype`, in which the decoder computes; where these are copies, `decoder.copied` has both tensors.
    """
    shape, rotary = shape_of(model), model.model.rotary_emb
    with torch.device("meta"):
        decoder = LlamaDecoder(shape, model.config.num_hidden_layers)
    decoder.rope, decoder.copied = Rope(shape), []
    if not rotary.inv_freq.is_meta:  # the model's own, which `model.half()` has rounded
        decoder.rope.inv_freq, decoder.rope.scaling = rotary.inv_freq.float(), rotary.attention_scaling
        decoder.copied.append((decoder.rope.inv_freq, rotary.inv_freq))
    body = model.model
    for block, layer in zip(decoder.blocks, body.layers, strict=True):
        state = block_state({name: parameter.data for name, parameter in layer.named_parameters()})
        block.load_state_dict(state, assign=True)
        for ours, theirs in MATRICES.items():
            for kind in ("weight", "bias"):
                if len(theirs) > 1 and (joined := state.get(f"{ours}.{kind}")) is not None:
                    _divide(joined, [getattr(layer.get_submodule(name), kind) for name in theirs])
    decoder.embed_tokens.weight = body.embed_tokens.weight
    decoder.norm.weight = body.norm.weight
    decoder.lm_head.weight = model.get_output_embeddings().weight
    for module in decoder.modules():
        if isinstance(module, nn.RMSNorm) and module.weight.dtype != dtype:
            own = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
            decoder.copied.append((own, module.weight))
            module.weight = own
    return decoder.eval()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one below the other, without a copy where they stand so in memory already."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.is_meta or part.data_ptr() != end:
            return torch.cat(parts)
        end += part.nbytes
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < end:  # neighbours of other storages
        return torch.cat(parts)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _divide(joined: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Make parameters views of the tensor in which their rows stand one below the other."""
    for parameter, piece in zip(parameters, joined.split([len(one) for one in parameters]), strict=True):
        parameter.data = piece


class LeanEngine:
    """Runs a Hugging Face model on the lean decoder, over the model's own memory.

    Args:
        model: Llama-like.
        dtype: to compute in; None: that of the model's weights. On a CPU the two may differ.
        layers: of what the linear layers become on a CPU.
        compiles: whether steps go through our own kernels, where the device and the model's shape allow it.
    """

    name = "lean"

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype | None = None,
        layers: type[RowsLinear] = RowsLinear,
        compiles: bool = True,
    ) -> None:
        self.model, self.layers, self._dtype, self._compiles = model, layers, dtype, compiles
        self._described, self._weights = describe(model), ()
        self._unembedding: Tensor | None = None
        self.begin()

    @property
    def device(self) -> torch.device:
        return self.model.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What steps and prompts are computed in: float32 on a CPU, even of a model in bfloat16.

        A step takes the time in which the weights are read, which stay as they are. With states in bfloat16 it would
        take no less, and a text would depend on how many tokens are computed at a time by more than float32 rounds.
        Long prompts take longer than in bfloat16, where the processor multiplies it.
        """
        return torch.float32 if self._widens else self.text_dtype

    @property
    def text_dtype(self) -> torch.dtype:
        """What whole texts are computed in."""
        return self._dtype or self.model.model.embed_tokens.weight.dtype

    @property
    def _widens(self) -> bool:
        return self.text_dtype == torch.bfloat16 and self.device.type == "cpu" and works(torch.bfloat16)

    @property
    def unembedding(self) -> Tensor:
        """[V, D], in the dtype of whole texts."""
        weight = self.model.get_output_embeddings().weight
        if weight.dtype == self.text_dtype:
            return weight
        if self._unembedding is None:
            self._unembedding = weight.to(self.text_dtype)
        return self._unembedding

    @property
    def decoder(self) -> LlamaDecoder:
        """The decoder of steps and prompts; made again where the model has been moved or changed its dtype since."""
        self._renew()
        return self._decoder

    @property
    def text_decoder(self) -> LlamaDecoder:
        """The decoder of whole texts."""
        self._renew()
        return self._text_decoder

    @property
    def storage(self) -> int:
        """Another number whenever the weights have moved in memory."""
        self._renew()
        return self._storage

    def begin(self) -> tuple[int, ...]:
        """Look before a generation at the model, whose tensors may be others now. Return where they are in memory.

        Raises:
            UserError: modules or hooks have changed since this was made, so it would compute another model.
        """
        if describe(self.model) != self._described:
            raise UserError(
                "modules or hooks of the model have changed since a target was made of it; make a new TargetModel"
            )
        if addresses(self.model) != self._weights:
            self._own, self._made_of = self.model.model.layers[0].self_attn.q_proj.weight, ()
            self._renew()
        with torch.inference_mode():
            for copied, original in self._copied:
                copied.copy_(original)
        return self._weights

    def _renew(self) -> None:
        own = self._own  # looking it up in the model would take longer than all else here
        made_of = own.data_ptr(), own.dtype, version(self.model.model) if self.layers is Int8Linear else 0
        if made_of == self._made_of:
            return
        with torch.inference_mode(own.is_inference()):  # what is made of inference tensors must be such
            whole = text = lean_decoder(self.model, self.dtype)
            copied = whole.copied
            if self._widens:
                text = lean_decoder(self.model, self.text_dtype)
                copied = [*copied, *text.copied]
            on_a_cpu, dtype = self.device.type == "cpu", self.text_dtype
            self._decoder = on_cpu(whole, self.layers) if on_a_cpu else whole
            converts = own.dtype != dtype or (on_a_cpu and (is_emulated(dtype) or outruns_torch(own.dtype)))
            self._text_decoder = on_cpu(text, TextLinear) if converts else text
        self._made_of = own.data_ptr(), *made_of[1:]  # which may have become a view
        self._weights, self._copied, self._unembedding = addresses(self.model), copied, None
        self._storage = unique()
        self._fuses = on_a_cpu and can_fuse(self._decoder, whole.shape)
        # The module that runs steps through our own kernels; None: torch runs them.
        self.fused = fused_kernels(whole.shape, self.device) if self._compiles else None

    def forward_of(
        self, cache: KVCache, n_rows: int, n_nodes: int, capture_layers: Sequence[int], n_silent: int = 0
    ) -> Forward | None:
        """Return what scores n_rows trees of n_nodes against a cache as one program; None where torch has to."""
        self._renew()
        if not (self._fuses and cache.keys and n_rows * n_nodes <= MOST_TOKENS):
            return None
        if cache.keys[0].dtype != torch.float32 or torch.is_grad_enabled():
            return None
        cache.programs = cache.programs or Programs()
        shape = n_rows, n_nodes, tuple(capture_layers), n_silent
        key = self._storage, cache.storage, *shape
        return cache.programs.get(key, lambda: Forward(self._decoder, cache, *shape))

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | Nodes | None = None,
        capture_layers: Sequence[int] = (),
        kept: Callable[[Tensor], Tensor] | None = None,
        keeps_final: bool = False,
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return logits [B, n, V], the inputs [B, n, D] of the blocks `capture_layers`, and the final states [B, n, D].

        Args:
            tokens: [B, n] int64.
            positions: [B or 1, n] int64; None: 0 .. n - 1.
            cache: see `LlamaDecoder.forward`.
            mask: see the same; `Nodes` are for the module `fused`, against a cache that has its buffers.
            capture_layers: indices of blocks.
            kept: maps the final states to those that logits are computed of; None: all.
            keeps_final: whether the caller reads the final states, which cost nothing here.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        decoder = self.text_decoder if cache is None else self.decoder
        if isinstance(mask, Nodes):
            final, inputs = self.fused.forward(decoder, tokens, positions, mask, cache, capture_layers)
            lm_head = partial(self.fused.linear, decoder.lm_head)
        else:
            final, inputs = decoder(tokens, positions, cache, mask, capture_layers)
            lm_head = decoder.lm_head
        logits = lm_head(final if kept is None else kept(final))
        return logits, inputs, final if keeps_final or kept else None

    @property
    def reads_prompts(self) -> bool:
        """Whether programs read prompts faster than torch does: they spend less time beside their products."""
        self._renew()
        return self._fuses and outruns_torch(self._decoder.lm_head.weight.dtype) and not torch.is_grad_enabled()

    def read_prompts(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        cache: KVCache,
        rows: range,
        capture_layers: Sequence[int],
        read: Tensor,
        parts: Sequence[tuple[int, int]],
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Read the parts of prompts one by one, in programs of a few tokens each.

        For arguments and what is returned, logits and captured states, see `TargetModel.reading`.
        """
        assert min(lengths) > 0, lengths
        shape, last = self._decoder.shape, []
        cache.begin(rows, [0] * len(rows), -(-max(lengths) // PIECE_STEP) * PIECE_STEP)
        for _ in range(len(self._decoder.blocks) - len(cache.keys)):
            cache.allocate(shape.n_kv_head, shape.head_dim, torch.float32, torch.device("cpu"))
        states_shape = *read.shape, len(capture_layers), shape.hidden_size
        captured = torch.zeros(states_shape, dtype=torch.float32, device="cpu") if capture_layers else None
        for place, (text, length) in enumerate(zip(tokens, lengths, strict=True)):
            wanted = read[place]
            for start in (start for first, end in parts for start in range(first, min(end, length), MOST_TOKENS)):
                stop = min(start + MOST_TOKENS, length)
                n = -(-(stop - start) // PIECE_STEP) * PIECE_STEP
                piece = F.pad(text[start:stop], (0, start + n - stop))
                forward = self.forward_of(cache, 1, n, capture_layers, n)
                assert forward is not None, cache.keys[0].dtype
                slots = torch.arange(start, start + n)[None]
                _, _, states, final = forward(piece[None], slots, slots, torch.tensor([start]), None, rows[place])
                if states is not None:
                    inside = (wanted >= start) & (wanted < stop)
                    captured[place, inside] = states[0, wanted[inside] - start]
                if stop < length:
                    yield
            last.append(final[0, length - 1 - start].clone())
        return self._decoder.lm_head(torch.stack(last))[:, None], captured

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final states [..., D]."""
        decoder = self.text_decoder if hidden.dtype == self.text_dtype else self.decoder
        return decoder.lm_head(hidden)
