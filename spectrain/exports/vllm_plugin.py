"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, whatever they serve.

So nothing but a name is registered: the class is imported where a drafter's folder asks for it.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec

from spectrain.exports.vllm_versions import ARCHITECTURE, PROPOSER, READ, TRIED

log = logging.getLogger("vllm.spectrain")  # below vLLM's own, so that it is shown


def register() -> None:
    """Register the class of SPIRe drafters; where this vLLM cannot run them, say why instead."""
    import vllm

    if (why := why_not(vllm.__version__)) is not None:
        log.warning("SPIRe drafters cannot be served: %s", why)
    else:
        vllm.ModelRegistry.register_model(ARCHITECTURE, f"spectrain.exports.vllm_spire:{ARCHITECTURE}")


def why_not(version: str) -> str | None:
    """Return why a vLLM of this version cannot run SPIRe drafters; None: it may."""
    found, oldest = (re.match(r"(\d+)\.(\d+)", one) for one in (version, TRIED[0]))
    number, least = (tuple(map(int, one.groups())) if one else (0, 1) for one in (found, oldest))
    known = f"they ran in vLLM {', '.join(TRIED)}, and the source of {', '.join(READ)} was read"
    if (0, 1) < number < least:  # (0, 1) are builds of one's own
        return f"this is vLLM {version}, which is too old; {known}"
    return None if find_spec(PROPOSER) else f"this vLLM {version} lacks its EAGLE-3 proposer ({PROPOSER}); {known}"
