"""Hidden states of a target that a vLLM on this machine serves: `data=served data.address=http://127.0.0.1:8000`.

    vllm serve <target> --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [6, 7, 8]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"}}'

The ids are those of the blocks whose inputs the drafter reads, and the number of blocks: the state before the last
norm, which is applied here. One request per document is answered with the path of a safetensors file, which holds
`hidden_states` [n, S, D] and `token_ids` [n]. It is locked while vLLM writes it, and removed once it is read. vLLM says
neither which layers nor which weights it has. So the states of a few tokens are first compared with those of the
target's own files, which are mapped and run on the CPU for it.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.target import TargetModel
from spectrain.target.hidden_states import Features
from spectrain.target.loading import open_tables
from spectrain.target.masks import document_offsets
from spectrain.target.target import FINAL
from spectrain.training.served import CONNECT_S, Patience

KEY = "OPENAI_API_KEY"  # as for the commands of data_prep
REQUESTS = 32  # at a time, which vLLM batches
POLL_S = 0.002  # between two looks at a file that vLLM still writes
PROBE_TOKENS = 32
MOST_APART = 0.2  # of the length of a state: more than rounding or quantised weights, less than another target's
EXCERPT_CHARACTERS = 200  # of vLLM's answer in a message


@dataclass
class VllmStates:
    """The vLLM at an address, for any number of threads; it has what `HiddenStates` has for a training.

    Raises:
        UserError: there is no such vLLM; it is gone for `timeout_s`, has other states than the target, or refuses a
            request; a file cannot be read here.
    """

    address: str  # http://host:port
    timeout_s: float
    target: TargetModel
    path: str  # of the target
    layers: tuple[int, ...]  # blocks whose inputs are read, or FINAL
    row_tokens: int  # of the longest document
    pinned: bool = False  # states lie in pinned memory
    dtype: str = ""  # of vLLM's states
    slots: list[int] = field(default_factory=list)  # of `layers` and the final state in vLLM's answers

    def __post_init__(self) -> None:
        self._patience = Patience(self.address, self.timeout_s, f"start vLLM with {self._options()}")
        self._pool = ThreadPoolExecutor(REQUESTS)
        self._norm = _final_norm(self.target)
        answer = self._patience.retried(partial(self._ask, "GET", "/v1/models"))
        try:
            (model,) = answer["data"]
            self._model, room = model["id"], model["max_model_len"]
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"data.address={self.address} is no vLLM that serves one model; give another") from error
        if self.row_tokens >= room:
            raise UserError(
                f"the vLLM at {self.address} takes {room - 1} tokens, but data.row_tokens={self.row_tokens}; lower it, "
                f"or start vLLM with --max-model-len {self.row_tokens + 1}"
            )
        self._check()

    @torch.no_grad()
    def features(self, tokens: Tensor, starts: Tensor | None = None, layers: Sequence[int] = ()) -> Features:
        """Return what `HiddenStates.features` returns, of some of the layers that this was made for."""
        slots = [*(self.slots[self.layers.index(layer)] for layer in layers), self.slots[-1]]
        flat, width = tokens.flatten(), self.target.unembedding.shape[-1]
        options = {"dtype": torch.bfloat16, "pin_memory": self.pinned}
        captured = torch.empty(len(flat), len(layers), width, **options)
        final = torch.empty(len(flat), width, **options)

        def fill(start: int, stop: int) -> None:
            with torch.no_grad():  # threads have modes of their own
                found = self._states(flat[start:stop])[:, slots]
                final[start:stop] = self._norm(found[:, -1].float())
                for place, layer in enumerate(layers):
                    captured[start:stop, place] = final[start:stop] if layer == FINAL else found[:, place]

        offsets = [*range(0, len(flat) + 1, tokens.shape[1])] if starts is None else document_offsets(starts)
        list(self._pool.map(fill, offsets, offsets[1:]))
        shape = tokens.shape
        return Features(captured.view(*shape, len(layers), width) if len(layers) else None, final.view(*shape, width))

    @torch.no_grad()
    def _check(self) -> None:
        """Find the slots of the layers, by states of the target's own files."""
        tokens = torch.arange(1, 1 + min(PROBE_TOKENS, self.row_tokens)) * 997 % self.target.vocab_size
        own, found = _own_states(self.target, self.path, tokens), self._states(tokens)
        self.dtype, found = str(found.dtype).removeprefix("torch."), found.float()
        nearest, apart = [], 1.0
        if found.shape[-1] == own.shape[-1]:
            distances = _apart(found[:, :, None], own[:, None])  # [S, number of blocks + 1]
            distances[:, -1] = _apart(self._norm(found), own[:, -1:])
            nearest, apart = distances.argmin(dim=1).tolist(), distances.min(dim=1).values.max()
        if not apart <= MOST_APART:
            raise UserError(
                f"the vLLM at {self.address} has another target than {self.path} (states differ by {apart:.0%}); give "
                "its target=..., or the address of another vLLM"
            )
        if missing := {*self._ids} - {*nearest}:
            raise UserError(
                f"the vLLM at {self.address} has the states {nearest}, but the drafter reads {sorted(missing)}, too; "
                f"start it with {self._options()}"
            )
        self.slots = [nearest.index(number) for number in self._ids]

    def _states(self, tokens: Tensor) -> Tensor:
        """Return the states [n, S, D] of a document, in vLLM's dtype."""
        asked = {"model": self._model, "prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0}
        answer = self._patience.retried(partial(self._ask, "POST", "/v1/completions", asked))
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise UserError(f"the vLLM at {self.address} writes no hidden states; start it with {self._options()}")
        return self._read(Path(path), tokens)

    def _read(self, path: Path, tokens: Tensor) -> Tensor:
        """Return the states of a file, once it is written, and remove it."""
        lock = path.with_name(f"{path.name}.lock")
        try:
            with suppress(FileNotFoundError), lock.open() as locked:
                _wait_for(locked, self.timeout_s)
            found = load_file(path)
            if not torch.equal(found["token_ids"], tokens):
                raise SafetensorError("it is of other tokens")
            for one in (path, lock):
                one.unlink(missing_ok=True)
        except (OSError, SafetensorError, LookupError) as error:
            raise UserError(
                f"the states that the vLLM at {self.address} wrote to {path} cannot be read here ({error}); give its "
                "connector a shared_storage_path that both processes have, with enough space"
            ) from error
        return found["hidden_states"]

    def _ask(self, method: str, path: str, body: Mapping | None = None) -> dict:
        """Return the answer to one request; OSError where there is none."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(KEY, 'none')}"}
        try:
            with closing(HTTPConnection(urlsplit(self.address).netloc, timeout=CONNECT_S)) as connection:
                connection.connect()
                connection.sock.settimeout(self.timeout_s)
                connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = connection.getresponse()
                status, text = answer.status, answer.read().decode(errors="replace")
        except HTTPException as error:
            raise ConnectionError(errno.EPROTO, "its answer breaks off, or is no HTTP") from error
        if status >= 500:
            raise ConnectionError(status, f"{status} {text[:EXCERPT_CHARACTERS]}")
        if status != 200:
            said = textwrap.shorten(text, EXCERPT_CHARACTERS, placeholder="..")
            raise UserError(f"the vLLM at {self.address} refuses {path}: {status} {said}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise UserError(f"data.address={self.address} answers {path} with no JSON; give that of a vLLM") from error

    @property
    def _ids(self) -> list[int]:
        """The layers and the final state, as vLLM counts them: this one is the number of blocks."""
        return [self.target.n_layer if layer == FINAL else layer for layer in (*self.layers, FINAL)]

    def _options(self) -> str:
        """Return the options of vLLM that the training needs."""
        config = {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({*self._ids})}}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": config}
        connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
        return f"--speculative-config '{json.dumps(method)}' --kv-transfer-config '{json.dumps(connector)}'"


def _final_norm(target: TargetModel) -> nn.Module:
    """Return a copy of the target's last norm, in float32 on the CPU."""
    norm = getattr(target.model.get_decoder(), "norm", None)
    if norm is None:
        raise UserError(
            f"the last norm of {target.config.model_type} models is not known; give data=online or a server of "
            "spectrain activations"
        )
    return copy.deepcopy(norm).float().cpu()


def _own_states(target: TargetModel, path: str, tokens: Tensor) -> Tensor:
    """Return the inputs of all blocks, and the final states, [n, n_layer + 1, D] float32 of tokens [n]."""
    if target.has_blocks:
        whole = target
    else:  # its blocks are mapped, in the dtype of the files, and its tables in another dtype on another device
        dtype = next(target.model.get_decoder().layers.parameters()).dtype
        whole = open_tables(Path(path), str(dtype).removeprefix("torch."), "cpu")
        decoder = whole.model.get_decoder()
        decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config)  # in no file
    reading = whole.with_capture([*range(target.n_layer), FINAL])
    return reading.features(tokens[None].to(whole.device)).captured[0].float().cpu()


def _apart(found: Tensor, own: Tensor) -> Tensor:
    """Return how far states [n, .., D] are from others, relative to their length: medians over tokens, [..]."""
    return ((found - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-6)).median(dim=0).values


def _wait_for(locked: object, timeout_s: float) -> None:
    """Return once a file's writer has unlocked it. TimeoutError: it has not for so long."""
    until = time.monotonic() + timeout_s
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(locked, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if time.monotonic() > until:
            raise TimeoutError(f"it has been locked for {timeout_s:g} s")
        time.sleep(POLL_S)
