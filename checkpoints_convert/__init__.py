"""Commands that convert between Hugging Face checkpoints and Megatron distributed checkpoints, and compare them.

    mugrpo convert hf_to_megatron --hf DIR --out DIR [--tp N --pp N --vpp N --ep N]
    mugrpo convert megatron_to_hf --megatron DIR --out DIR --like HF_DIR
    mugrpo convert verify --hf DIR --megatron DIR

One process; needs no launcher and no GPU. Names and shapes come from `mugrpo_megatron.weights`.
"""

from mugrpo_megatron.observe.environment import ignore_library_warnings

ignore_library_warnings()  # the commands' modules import Megatron
