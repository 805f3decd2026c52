"""Load a model from a folder or the Hugging Face hub; what goes wrong becomes one sentence for the user."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig
from transformers.utils.logging import set_tqdm_hook

from spectrain.errors import UserError, check_choice
from spectrain.kernels import works
from spectrain.target.fingerprint import fingerprint
from spectrain.target.lean import DRAFTED_FOR, why_not_lean
from spectrain.target.modules import check_layers
from spectrain.target.sharded import TensorGroup, sharded_class, tensor_group
from spectrain.target.target import TargetModel
from spectrain.target.weights import to_dtype

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_TIMEOUT_S = 10
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
FETCHED = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin")
SHOWN_WEIGHTS = 3  # names of weights in a refusal
FOREIGN_CODE = "needs code of its own folder, which is never run"
NOT_CAUSAL = "is no causal language model; choose a decoder-only model"
SLOW_BYTES = 2**28  # of weights in float32, from which on it is said that half would do
PARALLEL = ("none", "device_map", "tp")


def load_target(
    path_or_id: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    parallel: str = "none",
    capture_layers: Sequence[int] = (),
    role: str = "target",
    engine: str = "auto",
    graphs: str = "auto",
    compile: str = "auto",
    tp: int | None = None,
) -> TargetModel:
    """Load model and tokenizer, ready to decode.

    Args:
        path_or_id: a Hugging Face folder, or an id on the hub.
        dtype: float32, bfloat16 or float16.
        device: "auto" takes a GPU where there is one; ignored with "device_map".
        parallel: "device_map" spreads the layers over the visible devices, "tp" the weights over torchrun's ranks.
        tp: ranks that hold one target together; None: all.
        capture_layers, engine, graphs, compile: see `TargetModel`.
        role: what messages call the model.

    Raises:
        UserError: the model is missing, damaged or unsupported.
    """
    for option, value, known in (("dtype", dtype, DTYPES), ("parallel", parallel, PARALLEL)):
        check_choice(f"target.{option}", value, known)
    name = str(path_or_id)
    config = load_config(name, role)
    called = f"{role} {name} ({config.model_type})"
    check_layers(config, called)
    card = torch.device("cuda") if device == "auto" else device
    if parallel == "none" and torch.cuda.is_available() and str(card).startswith("cuda"):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        check_card(config, called, dtype, torch.cuda.mem_get_info(card)[0], has_bf16)
        if torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ and role == "target":
            log.warning(
                "%d GPUs are visible, of which target.parallel=none uses one; give target.parallel=device_map to use "
                "all, or CUDA_VISIBLE_DEVICES to name it",
                torch.cuda.device_count(),
            )
    group = tensor_group(tp, device) if parallel == "tp" else None
    options = {"dtype": DTYPES[dtype]} | ({"device_map": "auto"} if parallel == "device_map" else {})
    if group is None:
        model = _load_model(name, called, config, options)
    else:
        model = _load_share(name, called, config, options, group)
    try:
        tokenizer = read_tokenizer(name)
    except Exception as error:
        raise UserError(f"{role} {name} has no tokenizer that transformers can read ({first_line(error)})") from error
    if parallel == "none":
        model = _placed(model, device)
    check_finite(model, called)
    model.eval().requires_grad_(False)
    if engine != "transformers" and why_not_lean(model) is None:
        shorten(model)
        n_bytes = sum(one.nbytes for one in model.parameters() if one.dtype == torch.float32)
        if role == "target" and model.device.type == "cpu" and n_bytes > SLOW_BYTES and works(torch.bfloat16):
            log.info(
                "weights of the target need float32; target.dtype=bfloat16 would round them, and a step would read half"
            )
    options = {"engine": engine, "dtype": DTYPES[dtype], "graphs": graphs, "compile": compile, "group": group}
    target = TargetModel(model, tokenizer, capture_layers, **options)
    if group is not None:  # its ranks put it together once, so that later any of them may ask alone
        fingerprint(model, None)
    if not _is_causal(target):
        raise UserError(f"{called} {NOT_CAUSAL}")
    return target


def open_tables(folder: Path, dtype: str, device: str) -> TargetModel | None:
    """Open a target of which nothing is run, because a training reads its states elsewhere; see `load_target`.

    Only embedding and unembedding are in memory, in the dtype and on the device of the training. The other weights stay
    in their safetensors files, mapped, where fingerprints and pruned drafters read those that they need. None: it has
    to be loaded as a whole. That is so on the hub, and where the files do not hold each weight under the name that the
    model has for it.
    """
    try:
        on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=on)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder on this machine")
        config = read_config(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        mapped = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                mapped |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        if config.model_type not in DRAFTED_FOR or any(mapped[name].shape != shape for name, shape in shapes.items()):
            return None
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = read_tokenizer(folder)
    except Exception as error:  # loading the whole target will say what is wrong
        log.warning("the target is loaded as a whole, though no block is run: %s", first_line(error))
        return None
    model.load_state_dict({name: mapped[name] for name in shapes}, strict=False, assign=True)
    model.tie_weights()
    model.eval().requires_grad_(False)
    target = TargetModel(model, tokenizer, engine="transformers")
    target.tables.to(on, DTYPES[dtype])
    check_finite(target.tables, f"target {folder}")
    target.has_blocks = False
    return target


def check_card(config: PretrainedConfig, called: str, dtype: str, free_bytes: int, has_bf16: bool) -> None:
    """Raise UserError unless the weights of a model fit the free memory of a GPU, which computes in their dtype."""
    if dtype == "bfloat16" and not has_bf16:
        raise UserError(
            f"this GPU does not compute in bfloat16, which is the dtype of {called}; give target.dtype=float16"
        )
    if getattr(config, "quantization_config", None) is not None:
        return
    with torch.device("meta"):
        n_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    n_bytes = n_weights * DTYPES[dtype].itemsize
    if n_bytes > free_bytes:
        shorter = ", a shorter target.dtype" if dtype == "float32" else ""
        raise UserError(
            f"{called} has {n_bytes / 2**30:.1f} GiB of weights in {dtype}, but {free_bytes / 2**30:.1f} GiB of the "
            f"GPU are free; give target.parallel=device_map{shorter} or target.device=cpu"
        )


def _load_share(
    name: str, called: str, config: PretrainedConfig, options: Mapping[str, object], group: TensorGroup
) -> nn.Module:
    """Load this rank's share of a model. What one rank cannot read, all ranks of its group refuse."""
    kind, model, refusal = sharded_class(config, called, group), None, None
    options = {**options, "distributed_config": DistributedConfig(tp_size=group.size)}
    try:
        model = _load_model(name, called, config, options, kind)
    except UserError as error:
        refusal = error
    group.check(refusal)
    return model


def _load_model(
    name: str, called: str, config: PretrainedConfig, options: Mapping[str, object], kind: type = AutoModelForCausalLM
) -> nn.Module:
    """Load a model that has every weight of its config. `called`: its name in messages."""
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, by name
    options = {"config": config, **options, **reported}  # with torch's attention where the model can have it
    try:
        with quiet_transformers():
            model, found = kind.from_pretrained(name, trust_remote_code=False, **options)
            if (Path(name) / "generation_config.json").is_file():  # transformers passes over a broken one
                GenerationConfig.from_pretrained(name)
    except Exception as error:  # safetensors, torch and transformers each raise their own types here
        raise UserError(f"{called} {_why_no_model(error)}") from error
    check_complete(called, found)
    return model


def _placed(model: nn.Module, device: str) -> nn.Module:
    """Move a model to a device, or raise UserError where it cannot compute there."""
    try:
        model = model.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        model.get_input_embeddings().weight[0, 0].item()  # a device such as `meta` holds no numbers
    except (RuntimeError, AssertionError) as error:
        why = first_line(error)
        raise UserError(f"target.device={device} cannot be used ({why}); give target.device=cpu") from error
    return model


def shorten(model: nn.Module) -> None:
    """Keep float32 weights in bfloat16 where none loses anything and a kernel multiplies them: they are read faster."""
    weights = list(model.parameters())
    if any(one.dtype != torch.float32 or one.device.type != "cpu" for one in weights) or not works(torch.bfloat16):
        return
    if all(torch.equal(one.bfloat16().float(), one) for one in weights):
        to_dtype(weights, torch.bfloat16)


def read_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer of a folder or the hub, never running code beside it. Raises what transformers raises."""
    _ask_hub(name)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    tokenizer("a")  # options of a wrong type are noticed only now
    return tokenizer


def read_config(name: str | Path) -> PretrainedConfig:
    """Read a config of a folder or the hub, never running code beside it. Raises what transformers raises."""
    _ask_hub(name)
    return AutoConfig.from_pretrained(name, trust_remote_code=False)


def _ask_hub(name: str | Path) -> None:
    """Ask the hub once for what lies neither in a folder nor in its cache: transformers would try for half a minute."""
    if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(str(name), "config.json"), str):
        HfApi().model_info(str(name), timeout=HUB_TIMEOUT_S)


def check_finite(model: nn.Module, name: str) -> None:
    """Raise UserError if a weight is NaN or infinite."""
    for parameter_name, parameter in model.named_parameters():
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # of a tensor that ranks share
        if own.is_meta or own.dtype not in DTYPES.values() or not own.numel():  # offloaded or packed
            continue
        if not torch.stack(own.aminmax()).isfinite().all():  # a NaN is both; 30 times as fast as isfinite of each
            raise UserError(f"{name} has a weight that is no number ({parameter_name}); export or fetch it again")


def check_complete(name: str, found: Mapping[str, Iterable]) -> None:
    """Raise UserError unless the files held every weight of the model, in its shape, and nothing else."""
    mismatched = [key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]]
    for what, keys in (
        ("lacks weights", found["missing_keys"]),
        ("has weights that its config.json does not name", found["unexpected_keys"]),
        ("has weights of other shapes than its config.json says", mismatched),
    ):
        if keys := sorted(keys):
            shown = ", ".join(keys[:SHOWN_WEIGHTS]) + (", ..." if len(keys) > SHOWN_WEIGHTS else "")
            raise UserError(f"{name} {what} ({shown}); export or fetch it again")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the bar and the report of transformers on the weights that it loads. Downloads keep their bars."""
    before = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        set_tqdm_hook(before)


@torch.inference_mode()
def _is_causal(target: TargetModel) -> bool:
    """Whether a token's logits ignore what follows it. Encoders such as BERT load as causal models, too."""
    texts = (torch.tensor([[0, last]], device=target.device) for last in (1, 2))
    before, after = (target.forward(tokens).logits[0, 0] for tokens in texts)
    return torch.allclose(before.float(), after.float(), atol=1e-3, rtol=1e-3)


def load_config(name: str, role: str) -> PretrainedConfig:
    """Read a config of a folder or the hub. Raise UserError, which names the model by its role, if there is none."""
    folder = Path(name)
    is_here = folder.is_dir()
    if is_here and not (folder / "config.json").is_file():
        raise UserError(f"{role} folder {name} has no config.json; give the folder that save_pretrained wrote")
    if not is_here and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"{role} folder {name} does not exist; give an existing folder or a Hugging Face id")
    try:
        return read_config(name)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{role} {name} {FOREIGN_CODE}; give a model of an architecture that transformers has"
            ) from error
        why = f"folder {name} has a config.json that transformers cannot read ({first_line(error)})"
        raise UserError(f"{role} {why if is_here else _why_not_fetched(name, error)}") from error


def fetched(path_or_id: str | Path, option: str, files: Sequence[str] = FETCHED) -> Path:
    """Return a folder as it is, and of a Hugging Face id one with these files of it. `option`: it was given by.

    Raises:
        UserError: the hub has no such model, or there is no network.
    """
    name = str(path_or_id)
    if Path(name).exists() or not HUB_ID.fullmatch(name):
        return Path(name)
    try:
        _ask_hub(name)
        return Path(snapshot_download(name, allow_patterns=[*files], etag_timeout=HUB_TIMEOUT_S))
    except Exception as error:
        raise UserError(f"{option}={_why_not_fetched(name, error)}") from error


def _why_not_fetched(name: str, error: Exception) -> str:
    return (
        f"{name} is no folder here, and as a Hugging Face id it could not be fetched (no network, or no such model: "
        f"{first_line(error)}); give an existing folder, or an id while online"
    )


def _why_no_model(error: Exception) -> str:
    line = first_line(error)
    if "Unrecognized configuration class" in line or "for this kind of AutoModel" in line:
        return NOT_CAUSAL
    if any(word in f"{line} {error}".lower() for word in ("safetensor", "deserializ")):
        return f"has a missing or corrupt weight file ({line}); fetch or export it again"
    return f"could not be loaded ({line}); check the folder, its dtype and its files"


def first_line(error: Exception) -> str:
    """Return an error of transformers, or of a library below it, as one line."""
    text = str(error).strip() or "no message"
    if "trust_remote_code" in text:
        return f"it {FOREIGN_CODE}"
    return f"{type(error).__name__}: {text.splitlines()[0]}"
