"""The named objectives: what each sets of the `[objective]` section, and what a token's gradient depends on in it."""

from __future__ import annotations

from typing import Any, Literal

ObjectiveName = Literal[
    "mu_grpo",
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "gspo",
    "cispo",
    "topr",
    "opsm",
    "tis",
    "icepop",
    "m2po",
    "m2po_drop",
    "off_policy_grpo",
    "decoupled_ppo",
    "dppo",
    "sapo",
    "gmpo",
    "vespo",
    "seq_mis",
    "geo_rs",
]
VetoScope = Literal["none", "trigger", "suffix_non_trigger", "suffix", "response"]
Dependence = Literal["token", "prefix", "response"]

GRPO: dict[str, Any] = {"clip_low": 0.8, "clip_high": 1.2, "veto": "none", "reduction": "sequence_mean"}
PRESETS: dict[str, dict[str, Any]] = {
    "mu_grpo": {"clip_low": 0.0, "clip_high": 5.0, "veto": "suffix_non_trigger"},
    "grpo": GRPO,
    "dapo": GRPO | {"clip_high": 1.28, "reduction": "token_mean", "zero_variance": "mask"},
    "dr_grpo": GRPO | {"advantage": "group_mean", "reduction": "constant"},
    "rloo": GRPO | {"ratio": "sequence", "advantage": "leave_one_out"},
    "gspo": GRPO | {"ratio": "sequence_mean", "clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4},
    "cispo": GRPO | {"surrogate": "cispo", "clip_low": 0.0, "clip_high": 5.0, "reduction": "token_mean"},
    "topr": GRPO
    | {"surrogate": "topr", "ratio": "sequence", "clip_low": 0.0, "clip_high": 1.0, "reduction": "constant"},
    "opsm": GRPO | {"sequence_mask": 1e-4},
    "tis": GRPO | {"mismatch": "truncate", "mismatch_low": 0.0, "mismatch_high": 2.0},
    "icepop": GRPO | {"mismatch": "drop", "mismatch_low": 0.5, "mismatch_high": 5.0},
    "m2po": GRPO | {"second_moment": "clip", "clip_low": 0.0, "clip_high": 1e9, "reduction": "token_mean"},
    "m2po_drop": GRPO | {"second_moment": "drop", "reduction": "token_mean"},
    "off_policy_grpo": GRPO | {"clip_centre": "reference", "zero_variance": "mask"},
    "decoupled_ppo": GRPO | {"clip_centre": "proximal", "reference_every": 4},
    "dppo": GRPO
    | {"surrogate": "dppo", "clip_low": 0.0, "clip_high": 20.0, "advantage": "group_mean", "reduction": "constant"},
    "sapo": GRPO | {"surrogate": "sapo"},
    "gmpo": GRPO | {"surrogate": "gmpo", "clip_low": 0.67032, "clip_high": 1.49182},
    "vespo": GRPO | {"surrogate": "vespo", "ratio": "sequence", "reduction": "token_mean"},
    "seq_mis": GRPO
    | {"surrogate": "cispo", "ratio": "sequence", "clip_low": 0.0, "clip_high": 2.0, "reject": "sequence"},
    "geo_rs": GRPO | {"reject": "sequence_mean", "reject_low": 0.999, "reject_high": 1.001},
}
"""Defaults of each objective name; a field set in the recipe wins over its preset."""
SURROGATES: dict[str, Dependence] = {
    "ppo": "token",
    "cispo": "token",
    "topr": "token",
    "dppo": "token",
    "sapo": "token",
    "gmpo": "response",
    "vespo": "token",
}
"""What decides a token's gradient in each surrogate, beyond its importance ratio and its own log-probability."""
