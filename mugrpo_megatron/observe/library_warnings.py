"""The warnings of libraries that commands leave out."""

from __future__ import annotations

import warnings


def leave_out_library_warnings() -> None:
    """Ignore what Megatron and torch warn of, which `mugrpo doctor` reports in full; before they are imported."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
