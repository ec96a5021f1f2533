"""`mugrpo report`: one run's page, several runs on one page, or the live page of a running run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.streams import visible
from mugrpo_megatron.report.compare import write_comparison
from mugrpo_megatron.report.live import serve
from mugrpo_megatron.report.report import write_report


def report(run_dirs: Sequence[Path], out: Path | None, live: bool, port: int) -> None:
    """Write the page and print where it is; with `live`, serve it until interrupted.

    Raises UserError for options that do not go together, and for what the page's writer refuses.
    """
    if live:
        if len(run_dirs) > 1 or out is not None:
            raise UserError("--live shows one run and writes nothing; name one run directory and leave --out out")
        serve(run_dirs[0], port)
        return
    if len(run_dirs) == 1:
        if out is not None:
            raise UserError("--out is for a page of several runs; one run's is RUN_DIR/report.html")
        print(visible(str(write_report(run_dirs[0]))))
        return
    if out is None:
        raise UserError("several runs need --out PAGE.html; no run's directory is the place of their common page")
    print(visible(str(write_comparison(run_dirs, out))))
