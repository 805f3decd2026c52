"""llama.cpp as a baseline: its own generation, through llama-cpp-python, with the target's weights.

Both packages that this needs are installed by hand: pip install llama-cpp-python gguf. The weights are written to a
GGUF file without a tokenizer, because prompts are token ids. They and the KV cache keep the target's dtype.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from spectrain.decoding import Generation, Sampling, TargetModel
from spectrain.decoding.lean import shape_of, why_not_lean
from spectrain.decoding.llama import LlamaShape, Rope
from spectrain.errors import UserError

LLAMA_CPP = ("llama_cpp", "llama_cpp_lookup")
PACKAGES = ("llama_cpp", "gguf")
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by model_type
SCALED_ROPES = ("linear", "llama3")  # which the architecture llama takes as divisors of its frequencies
GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # as in GGUF files
LEAST_CONTEXT_TOKENS = 2048  # a longer text has the model opened again


def check_options(sampling: Sampling) -> None:
    """Raise UserError where sampling is not greedy or a package is missing.

    llama.cpp applies the temperature after top-k and top-p, so that it would sample from another distribution.
    """
    if not sampling.greedy:
        asked = sampling.describe()
        raise UserError(f"peers={LLAMA_CPP[0]} decodes greedily only, not with {asked}; give sampling=greedy")
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            why = f"peers={LLAMA_CPP[0]} needs packages that spectrain does not install ({error})"
            raise UserError(f"{why}; run pip install llama-cpp-python gguf") from None


def why_not(target: TargetModel) -> str | None:
    """Return why llama.cpp cannot decode a target as we do, or None where it can."""
    if (why := why_not_lean(target.model)) is not None:
        return why
    shape = shape_of(target.model)
    rope = shape.rope_parameters.get("rope_type", "default")
    if rope != "default" and (rope not in SCALED_ROPES or ARCHITECTURES[target.config.model_type] != "llama"):
        return f"its RoPE is of type {rope}"
    if shape.hidden_act != "silu":
        return f"its activation function is {shape.hidden_act}, not silu"
    return None if target.device.type == "cpu" else f"it is on {target.device}, not on the CPU"


class WeightsFile:
    """A GGUF file of a target's weights, in a temporary folder that goes with this object.

    Raises:
        UserError: llama.cpp cannot decode the target, or the file cannot be written.
    """

    def __init__(self, target: TargetModel) -> None:
        if (why := why_not(target)) is not None:
            raise UserError(f"peers={LLAMA_CPP[0]} cannot decode this target: {why}; leave it out of peers")
        folder = tempfile.mkdtemp(prefix="spectrain-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path, self.ggml_type = Path(folder) / "target.gguf", GGML_TYPES[target.dtype]
        self.max_tokens = target.max_positions
        try:
            write_gguf(target, self.path)
        except OSError as error:
            why = f"the weights for peers={LLAMA_CPP[0]} cannot be written to {self.path} ({error})"
            raise UserError(f"{why}; make room there, or set TMPDIR to another folder") from None


def write_gguf(target: TargetModel, file: Path) -> None:
    """Write the weights of a target that `why_not` has nothing against."""
    gguf, shape, name = import_module("gguf"), shape_of(target.model), ARCHITECTURES[target.config.model_type]
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it reports every file
    writer = gguf.GGUFWriter(file, name)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(target.max_positions)
    writer.add_block_count(target.n_layer)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_kv_head)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, target.n_layer)
    state = target.model.state_dict().items()
    tensors = {names.get_name(key, (".weight", ".bias")): one.to(target.dtype) for key, one in state}
    if shape.tie_embeddings:
        tensors.pop("output.weight", None)
    if name == "llama":
        tensors = {key: _paired(key, tensor, shape) for key, tensor in tensors.items()}
        unscaled = shape.rope_parameters["rope_theta"] ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        tensors["rope_freqs.weight"] = unscaled / Rope(shape).inv_freq
    for key, tensor in tensors.items():
        tensor = tensor.contiguous() if tensor.ndim > 1 else tensor.float()  # llama.cpp has all vectors in float32
        ggml_type = gguf.GGMLQuantizationType(GGML_TYPES[tensor.dtype])
        writer.add_tensor(key, tensor.view(torch.uint8).numpy(), raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(name: str, tensor: Tensor, shape: LlamaShape) -> Tensor:
    """Reorder rows of queries and keys: llama.cpp rotates neighbours of a head where we rotate its halves."""
    heads = {"attn_q": shape.n_head, "attn_k": shape.n_kv_head}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, shape.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


class LlamaCpp:
    """llama.cpp on a target's weights and on as many threads as torch has; called as `generate` is.

    Args:
        weights: of the target.
        eos_ids: the target's.
        draft_tokens: most tokens of a draft of its prompt lookup; 0: plain decoding.
        max_ngram: longest n-gram that its prompt lookup looks for.
    """

    def __init__(self, weights: WeightsFile, eos_ids: Sequence[int], draft_tokens: int = 0, max_ngram: int = 0):
        self.weights, self.eos_ids, self.draft_tokens = weights, eos_ids, draft_tokens
        self.llama, self.context_tokens = None, 0
        self.drafted: list[int] = []  # tokens of each draft
        self.draft = self._counted_lookup(max_ngram) if draft_tokens else None

    def __call__(self, prompts: Sequence[list[int]], max_new_tokens: int, *_, **__) -> list[Generation]:
        """Continue prompts one at a time, greedily (see `check_options`), so that no other argument is read."""
        return [self._continue(prompt, max_new_tokens) for prompt in prompts]

    def _continue(self, prompt: list[int], max_new_tokens: int) -> Generation:
        self._make_room(min(len(prompt) + max_new_tokens + self.draft_tokens, self.weights.max_tokens))
        self.llama.reset()  # nothing is reused of an earlier prompt
        self.drafted.clear()
        tokens, forwards = [], []  # forwards: after prefill, up to each token
        began = time.perf_counter()
        for token in self.llama.generate(prompt, temp=0.0):
            tokens.append(token)
            forwards.append(len(self.drafted) if self.draft else len(tokens) - 1)
            if token in self.eos_ids or len(tokens) == max_new_tokens:
                break
        elapsed_s, emitted = time.perf_counter() - began, Counter(forwards)
        return Generation(
            tokens=tokens,
            finish_reason="eos" if tokens[-1] in self.eos_ids else "length",
            target_forwards=forwards[-1],
            accepted=[emitted[n] - 1 for n in range(1, forwards[-1] + 1)] if self.draft else [],
            drafted=list(self.drafted),
            elapsed_s=elapsed_s,
            prefill_s=elapsed_s,  # is not separated from the rest
        )

    def _make_room(self, n_tokens: int) -> None:
        """Open the model with a context of at least n tokens."""
        if n_tokens <= self.context_tokens:
            return
        if self.llama is not None:
            self.llama.close()
        roomy = max(LEAST_CONTEXT_TOKENS, 2 ** (n_tokens - 1).bit_length())
        self.context_tokens = min(roomy, self.weights.max_tokens)
        self.llama = import_module("llama_cpp").Llama(
            str(self.weights.path),
            n_ctx=self.context_tokens,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            type_k=self.weights.ggml_type,
            type_v=self.weights.ggml_type,
            logits_all=self.draft is not None,  # which verification reads
            draft_model=self.draft,
            verbose=False,
        )

    def _counted_lookup(self, max_ngram: int) -> Callable:
        """Return llama-cpp-python's prompt lookup, which is called once before each forward after prefill."""
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(max_ngram, self.draft_tokens)
        drafted = self.drafted

        def draft(tokens, **options):
            found = lookup(tokens, **options)
            drafted.append(len(found))
            return found

        return draft
