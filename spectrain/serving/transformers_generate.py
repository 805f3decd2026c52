"""An exported drafter or lookup method in transformers, whose `generate` runs the code of a folder on request.

    model.generate(**inputs, custom_generate="exported/spire/decode", trust_remote_code=True)

transformers reads the arguments and prepares prompts, options and stopping criteria as it does for its own decoding.
Then our loop writes the text, and each of its tokens is judged and streamed as if transformers had drawn it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from spectrain.decoding import Drafter, Sampling, TargetModel
from spectrain.decoding.engine import Engine, Request
from spectrain.decoding.loading import read_tokenizer
from spectrain.errors import UserError
from spectrain.methods.loading import load_method

WARPERS = {
    f"{name}LogitsWarper": option
    for name, option in {"Temperature": "temperature", "TopK": "top_k", "TopP": "top_p", "MinP": "min_p"}.items()
}
PASSED = ("inputs", "input_ids", "attention_mask", "generation_config", "stopping_criteria", *vars(GenerationConfig()))
MODES = ("greedy_search", "sample")
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: PreTrainedModel,
    code: str | None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: object = None,
    synced_gpus: bool | None = None,
    **arguments: object,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Continue prompts as `model.generate` does, with the drafts of an export.

    Args:
        model: the target of the export, which keeps the drafter that the first call opens.
        code: the folder `decode` of the export.
        stop_strings: are read by the export's tokenizer, so that `tokenizer` is not.
        **arguments: all others of `generate`. Samples of `torch.manual_seed` are others than those of transformers.

    Returns:
        Token ids [B, T] int64, prompts included, or with `return_dict_in_generate` an object with these `sequences`.

    Raises:
        UserError: the export is damaged or of another model, or an argument is none that speculation supports.
    """
    if not isinstance(code, str):
        raise UserError("this runs inside of transformers; call model.generate(custom_generate=<export>/decode, ...)")
    given = {name: value for name, value in arguments.items() if name in PASSED or value is not None}
    _refuse(sorted(given.keys() - PASSED))
    stop = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    decode = partial(_decode, drafter=_drafter(model, Path(code).parent), streamer=streamer, stop=stop)
    return GenerationMixin.generate(model, **given, streamer=streamer, custom_generate=decode)


def _refuse(names: list[str]) -> None:
    for name in names:
        raise UserError(f"{name} does not go with an exported drafter; remove it, or generate without custom_generate")


class _Kept(dict):
    """Drafters of a model by folder. They lie on the model and go with it; a copy of the model begins without any."""

    def __reduce__(self) -> tuple:
        return _Kept, ()


def _drafter(model: PreTrainedModel, export: Path) -> Drafter:
    kept, key = vars(model).setdefault("_spectrain", _Kept()), (export.resolve(), model.device, model.dtype)
    if key not in kept:
        on_cpu = model.device.type == "cpu" and model.dtype == torch.bfloat16  # where float32 is as fast, and exact
        target = TargetModel(model, read_tokenizer(export), dtype=torch.float32 if on_cpu else None)
        kept[key] = load_method(export, target)
    return kept[key]


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,  # [B, P] int64
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    streamer: BaseStreamer | None,
    stop: tuple[str, ...],
    **prepared: object,  # attention_mask [B, P], None if no prompt is padded; cache and positions, which our loop has
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode what transformers has prepared, in place of its own loop."""
    config, mask, mode = generation_config, prepared.get("attention_mask"), generation_config.get_generation_mode()
    _refuse([*{mode.value}.difference(MODES), *(one for one in OUTPUTS if getattr(config, one))])
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    if (mask.diff(dim=1) < 0).any():
        raise UserError("attention_mask has zeros behind ones; pad on the left (tokenizer.padding_side='left')")
    if streamer is not None and len(input_ids) > 1:
        raise UserError(f"a streamer shows one text, but there are {len(input_ids)}; give one prompt, or no streamer")
    sampling, eos = _sampling(logits_processor), config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = next((one for one in (config.pad_token_id, *eos) if one is not None), 0)
    seed, (n_rows, end) = 0 if sampling.greedy else int(torch.randint(2**31, ())), input_ids.shape
    # With shared noise a sample does not depend on how much is drafted, which a clock decides.
    options = {"max_length": config.max_length, "stop_token_ids": eos, "draws": "shared", "reads_in_pieces": False}
    engine = Engine(drafter.target, drafter, n_rows, **options)
    for row, (ids, kept) in enumerate(zip(input_ids, mask.bool(), strict=True)):
        engine.submit(Request(ids[kept].tolist(), config.max_length - end, sampling, seed, row, stop))
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


def _sampling(processors: LogitsProcessorList) -> Sampling:
    options = {}
    for one in processors:
        if (name := type(one).__name__) not in WARPERS:
            raise UserError(
                f"{name} would change the logits, but drafts are verified under temperature, top_k, top_p and min_p "
                "alone; remove the option of generate, or of model.generation_config, that asks for it"
            )
        options[WARPERS[name]] = getattr(one, WARPERS[name])
    return Sampling(**options)
