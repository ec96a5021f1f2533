"""A rank for tests/scaling/test_launch.py: joins, then does what its argument says when it is asked to stop."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import torch.distributed as dist


def main(mode: str, seconds: float) -> int:
    """Wait for SIGTERM or SIGINT, work for `seconds` more, and exit with 0.

    mode "fails": rank 1 exits with 3 once both ranks have joined. mode "survives": signals are noted, nothing else.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "0":
        processes = [psutil.Process(), psutil.Process(os.getppid())]
        listening = [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        print("listening", *sorted({socket.laddr.ip for socket in listening}), flush=True)
    dist.barrier()
    if mode == "fails" and os.environ["RANK"] == "1":
        return 3
    while not asked or mode == "survives":
        time.sleep(0.02)
        if asked and mode == "survives":
            print("asked", flush=True)
            asked.clear()
    time.sleep(seconds)
    print("saved", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
