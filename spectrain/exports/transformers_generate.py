"""An exported drafter or lookup method in transformers, whose `generate` runs the code of a folder on request.

    model.generate(**inputs, custom_generate="exported/spire/decode", trust_remote_code=True)

transformers reads the arguments and prepares prompts, options and stopping criteria as it does for its own decoding.
Then our loop writes the text, and each of its tokens is judged and streamed as if transformers had drawn it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import RLock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, StopStringCriteria

from spectrain.decoding import Drafter, Sampling
from spectrain.decoding.engine import Engine, Request
from spectrain.errors import UserError
from spectrain.methods.registry import load_method
from spectrain.target import TargetModel
from spectrain.target.kv_cache import KVCache
from spectrain.target.loading import read_tokenizer
from spectrain.target.modules import describe
from spectrain.target.tree import DraftTree

WARPERS = {
    f"{name}LogitsWarper": option
    for name, option in {"Temperature": "temperature", "TopK": "top_k", "TopP": "top_p", "MinP": "min_p"}.items()
}
ARGUMENTS = ("inputs", "input_ids", "attention_mask", "generation_config", "stopping_criteria")
# Fields of a GenerationConfig that we support, or that have no effect without beam search or assisted decoding. Every
# other field, also of later versions, must have a value that changes nothing.
TAKEN = (
    *("max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", *WARPERS.values()),
    *("num_return_sequences", "return_dict_in_generate", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("early_stopping", "length_penalty", "diversity_penalty", "low_memory", "decoder_start_token_id"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
    *("speculation_type", "disable_compile", "transformers_version"),
)
NEUTRAL = dict.fromkeys(  # what asks for nothing as None does, where it is not False or 0
    ("use_cache", "num_beams", "num_beam_groups", "typical_p", "repetition_penalty", "encoder_repetition_penalty"), 1
) | {"guidance_scale": 1, "cache_implementation": "hybrid"}  # in old files, where transformers takes it for None
FIELDS = {name for name in vars(GenerationConfig()) if name[0] != "_"}


def generate(
    model: PreTrainedModel,
    code: str | None,
    streamer: BaseStreamer | None = None,
    tokenizer: object = None,
    **arguments: object,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Continue prompts as `model.generate` does, with the drafts of an export.

    Threads that share a model take turns.

    Args:
        model: the target of the export, which keeps the drafter that the first call opens.
        code: the folder `decode` of the export.
        tokenizer: reads stop strings; None: the export's.
        **arguments: all others of `generate`. Samples of `torch.manual_seed` are others than those of transformers.

    Returns:
        Token ids [B, T] int64, prompts included, or with `return_dict_in_generate` an object with these `sequences`.

    Raises:
        UserError: the export is damaged or of another model, or the model or an argument is none that speculation
            supports.
    """
    if not isinstance(code, str):
        raise UserError("this runs inside of transformers; call model.generate(custom_generate=<export>/decode, ...)")
    given = {name: one for name, one in arguments.items() if name in {*ARGUMENTS, *FIELDS} or one is not None}
    stop = _checked(model, given).get("stop_strings")
    kept = vars(model).setdefault("_spectrain", _Kept())
    with kept.lock:
        drafter = kept.drafter(model, Path(code).parent.resolve())
        if stop:
            criterion = StopStringCriteria(tokenizer or drafter.method.target.tokenizer, stop)
            given["stopping_criteria"] = StoppingCriteriaList([*(given.get("stopping_criteria") or ()), criterion])
        given |= {"stop_strings": None, "custom_generate": partial(_decode, drafter=drafter, streamer=streamer)}
        return GenerationMixin.generate(model, **given, streamer=streamer)


def _checked(model: PreTrainedModel, given: Mapping[str, object]) -> dict[str, object]:
    """Return the options of generation as transformers puts them together. Raise UserError for one that is not done."""
    asked = vars(given.get("generation_config") or GenerationConfig())
    config = vars(model.generation_config) | {key: one for key, one in asked.items() if one is not None} | given
    wrong = [name for name in given.keys() - FIELDS - set(ARGUMENTS) if given[name] is not False]
    wrong += vars(model).keys() & {"prepare_inputs_for_generation"}  # of the model's own, as for prompt tuning
    for name in FIELDS.difference(TAKEN):
        value, neutral = config.get(name), NEUTRAL.get(name, False)
        if value is not None and (not isinstance(value, int | float | str) or value != neutral):
            wrong.append(name)
    if wrong:
        raise UserError(
            f"{min(wrong)} does not go with an exported drafter; take it out of the arguments or of "
            "model.generation_config, or generate without custom_generate"
        )
    for module in (one for one in model.modules() if one.training):
        drops = any(one for name, one in vars(module).items() if name == "p" or name.endswith("dropout"))
        if drops or getattr(module, "gradient_checkpointing", False):
            raise UserError("the model is in training mode, where it drops numbers or its cache; call model.eval()")
    return config


class _Kept(dict[Path, tuple[tuple, Drafter]]):
    """Opened exports by folder, each with the state of the model that it was opened for.

    They lie on the model and go with it. A copy of the model begins without any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = RLock()

    def __reduce__(self) -> tuple:
        return _Kept, ()

    def drafter(self, model: PreTrainedModel, export: Path) -> Drafter:
        """Open an export, if that has not been done for the model as it is now."""
        tensors = [(one.dtype, one.device) for one in model.parameters()]
        state = describe(model), tensors, model.config.to_dict(), model.config._attn_implementation
        if export not in self or self[export][0] != state:
            target = TargetModel(model, read_tokenizer(export))
            if target.engine == "transformers":
                _check_scores(target)
            self[export] = state, load_method(export, target)
        return self[export][1]


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,  # [B, P] int64
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    streamer: BaseStreamer | None,
    **prepared: object,  # attention_mask [B, P], None if no prompt is padded; cache and positions, which our loop has
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode what transformers has prepared, in place of its own loop."""
    config, mask = generation_config, prepared.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    if (mask.diff(dim=1) < 0).any():
        raise UserError("attention_mask has zeros behind ones; pad on the left (tokenizer.padding_side='left')")
    if streamer is not None and len(input_ids) > 1:
        raise UserError(f"a streamer shows one text, but there are {len(input_ids)}; give one prompt, or no streamer")
    sampling, eos, pad = _sampling(config, logits_processor), config._eos_token_tensor, config._pad_token_tensor
    eos, pad = [] if eos is None else eos.tolist(), 0 if pad is None else int(pad)
    # Here transformers goes on with the texts that have ended.
    if not eos and len(input_ids) > 1 and len(stopping_criteria) > 1:
        raise UserError("texts that end apart are padded behind an end-of-text token; give eos_token_id, or one prompt")
    seed, (n_rows, end) = 0 if sampling.greedy else int(torch.randint(2**31, ())), input_ids.shape
    # With shared noise a sample does not depend on how much is drafted, which a clock decides.
    options = {"max_length": config.max_length, "stop_token_ids": eos, "draws": "shared", "reads_in_pieces": False}
    engine = Engine(drafter.method.target, drafter, n_rows, **options)
    for row, (ids, kept) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        engine.submit(Request(ids[kept].tolist(), config.max_length - end, sampling, seed, row))
    text, ends, done = F.pad(input_ids, (0, config.max_length - end), value=pad), [end] * n_rows, set()
    try:
        while engine.has_work:
            for step in engine.step():
                if step.error is not None:
                    raise UserError(step.error)
                row = step.request
                for token in step.tokens if row not in done else ():  # a row may read and step in one call
                    text[row, ends[row]] = token
                    ends[row] += 1
                    is_done = stopping_criteria(text[row : row + 1, : ends[row]], None).any()
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    if is_done:
                        done.add(row)
                        engine.cancel(row)
                        break
    finally:
        engine.close()
    if streamer is not None:
        streamer.end()
    text = text[:, : max(ends)]
    return GenerateDecoderOnlyOutput(sequences=text) if config.return_dict_in_generate else text


def _sampling(config: GenerationConfig, processors: LogitsProcessorList) -> Sampling:
    options = {"temperature": 1.0} if config.do_sample else {}
    for one in processors:
        if (name := type(one).__name__) not in WARPERS:
            raise UserError(f"{name} changes the logits of this model; generate without custom_generate")
        options[WARPERS[name]] = getattr(one, WARPERS[name])
    return Sampling(**options)


@torch.inference_mode()
def _check_scores(target: TargetModel, n_tokens: int = 8) -> None:
    """Raise UserError unless a forward over several tokens scores each as a forward over it alone does.

    Hooks may do otherwise, for instance one that changes the last position of each call.
    """
    found, tokens, why = ([], []), 1 + torch.arange(n_tokens, device=target.device)[None], "than one by one"
    try:
        for logits, size in zip(found, (1, n_tokens), strict=True):
            cache = KVCache(1, n_tokens=n_tokens)
            target.prefill(tokens[:, :1], [1], cache, range(1))
            for part in tokens[:, 1:].split(size, dim=1):
                logits.append(target.score(DraftTree.chain(part[:, 0], part[:, 1:]), cache).logits.float())
                cache.keep(part.shape[1])
        alone, together = (torch.cat(logits, dim=1) for logits in found)
        tolerance = (1e-3 if target.dtype.itemsize > 2 else 0.05) * float(alone.abs().max())
        is_alike = torch.allclose(alone, together, rtol=0, atol=tolerance)
    except Exception as error:  # of modules and hooks that we do not know
        is_alike, why = False, f"than one by one, or not at all ({type(error).__name__}: {error})"
    if not is_alike:
        raise UserError(
            f"the model or its hooks cannot verify drafts: several tokens in one call are computed otherwise {why}; "
            "generate without custom_generate"
        )
