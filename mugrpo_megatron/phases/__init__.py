"""The phases of a run, as `train.py` names them."""

from mugrpo_megatron.phases.evaluate import evaluate_if_due
from mugrpo_megatron.phases.finish import finish
from mugrpo_megatron.phases.generate import generate, stage_to_generate
from mugrpo_megatron.phases.saves import save_if_due
from mugrpo_megatron.phases.stage import open_stage
from mugrpo_megatron.phases.sync import sleep_engines, sync_weights

__all__ = [
    "evaluate_if_due",
    "finish",
    "generate",
    "open_stage",
    "save_if_due",
    "sleep_engines",
    "stage_to_generate",
    "sync_weights",
]
