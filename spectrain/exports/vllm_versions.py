"""Names that exports and the code inside vLLM share, the versions of vLLM that were tried, and a check of its sampling.

It imports nothing of vLLM itself, so anything of ours may import it.
"""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("vllm.spectrain")  # below vLLM's own, so that it is shown

ARCHITECTURE = "SpireLlamaEagle3"  # the class of SPIRe drafters; vLLM leaves names that end like this as they are
PROPOSER = "vllm.model_executor.models.llama_eagle3"  # the module whose class that one extends
FORMAT = 1  # of the folder `vllm/` of an export
TRIED = ("0.32.0",)  # our exports were started in it, on a CPU
READ = ("0.33.0",)  # its sources were read
MARK = 0.8125


def warn_if_samples_are_wrong() -> None:
    """Log one sentence where this vLLM verifies drafts wrongly at temperatures above 0. Call it in the worker."""
    if not samples_are_right():
        log.warning(
            "this build of vLLM (%s) verifies drafts with temperatures that it has never set, so sampled text is wrong "
            "with any speculative method; ask with temperature 0, or serve without --speculative-config",
            getattr(sys.modules["vllm"], "__version__", "unknown"),
        )


def samples_are_right() -> bool:
    """Whether vLLM hands each drafted token the temperature of its request. Elsewhere than in a worker: True.

    vLLM 0.32.0 on a CPU without Triton fills a copy of the temperatures and throws it away (`_expand_kernel_impl` in
    `vllm/utils/cpu_triton_utils.py`). Whether a build does is asked of its own function, not of its version.
    """
    platforms, sampler = map(sys.modules.get, ("vllm.platforms", "vllm.v1.sample.rejection_sampler"))
    if sampler is None or not platforms.current_platform.is_cpu():
        return True
    torch = sys.modules["torch"]
    temperatures, ends = torch.full((1,), MARK), torch.tensor([4], dtype=torch.int32)
    return bool((sampler.expand_batch_to_tokens(temperatures, ends, 4) == MARK).all())
