"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, perhaps several times."""

import logging
import os

from gva.serve import checks, versions
from gva.weights import verify_folder


def register() -> None:
    """Make vLLM know GVA models. Where its version was never run it keeps serving other models: the reason is logged,
    and raised when a GVA model is loaded."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from gva.config import GvaConfig

    why = versions.refusal(versions.installed())
    if why is not None:
        logging.getLogger("vllm.gva").warning("GVA models will not load: %s", why)

    class Checks(VerifyAndUpdateConfig):
        """Run by vLLM in the process of the user, before engines and workers start."""

        @staticmethod
        def verify_and_update_config(vllm_config) -> None:
            check_engine(vllm_config)

    AutoConfig.register(GvaConfig.model_type, GvaConfig, exist_ok=True)
    ModelRegistry.register_model(checks.ARCHITECTURE, f"gva.serve.model:{checks.ARCHITECTURE}")
    MODELS_CONFIG_MAP[checks.ARCHITECTURE] = Checks


def check_engine(vllm_config) -> None:
    """Refuse what would fail later and less clearly: a version, a checkpoint, a split, a cache."""
    versions.check()
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_config
    checks.check_servable(config)
    checks.check_ranks(config, parallel.tensor_parallel_size)
    checks.check_cache_dtype(config, vllm_config.cache_config.cache_dtype, model.dtype)
    if os.path.isdir(model.model) and vllm_config.load_config.load_format != "dummy":
        verify_folder(model.model)  # `gva serve` has compared its bytes
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        ranks = getattr(parallel, name, 1)
        checks.check(ranks == 1, name, ranks, "GVA models have no context parallelism in vLLM yet: must be 1")
