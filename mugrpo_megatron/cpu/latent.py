"""Multi-head latent attention on SGLang's CPU engine without AMX: the attention's form and the rotation.

SGLang 0.5.15 prefills such a layer with the keys and values of its heads and decodes with the cached latents. Its
attention for CPUs reads keys from the cache in both, where only latents are, so here both use the latents; the hook is
SGLang's own registry. And its rotation for CPUs knows no model without YaRN, though the general one runs there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mugrpo_megatron.files.hf_config import read_config


def install(model_path: str, backend: str) -> None:
    """Prepare this process, which loads the model next; does nothing for models with other attention."""
    if not read_config(Path(model_path)).get("kv_lora_rank"):
        return
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register(backend, lambda attention, batch: AttnForwardMethod.MLA)
    stretched = factory.get_rope_cpu

    def rotation(*arguments: Any) -> Any:
        *_, scaling, _, _, _ = arguments
        return stretched(*arguments) if scaling else factory.get_rope(*arguments[:-1])

    factory.get_rope_cpu = rotation
