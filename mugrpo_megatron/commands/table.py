"""The table of `mugrpo`'s commands, in the order of its help."""

from __future__ import annotations

from mugrpo_megatron.commands.table_measuring import DOCTOR, EVAL, PLAN, SCORE
from mugrpo_megatron.commands.table_runs import IMPORT, PUBLISH, REPORT, ROLLOUTS
from mugrpo_megatron.commands.table_training import GENERATE, OPTIMIZE, SEAL, SFT, SWEEP, TRAIN

COMMANDS = (TRAIN, GENERATE, SEAL, OPTIMIZE, SWEEP, SFT, EVAL, SCORE, PLAN, ROLLOUTS, PUBLISH, IMPORT, REPORT, DOCTOR)
