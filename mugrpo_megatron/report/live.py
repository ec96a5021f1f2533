"""`mugrpo report --live`: the report of a running run, served only to this machine, refreshed while it runs."""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.observe.rundata import read_run
from mugrpo_megatron.report.page import page

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""What a request may call this server: a page of another site that has its name point here calls it otherwise."""
REFRESH_S = 10
"""Seconds between two looks of the page at its run."""
PATIENCE_S = 10.0
"""A connection that sends nothing, or takes nothing, for so long is closed: each holds a thread."""


def server_of(run_dir: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback interface that answers every request with the run's report as it is now.

    `port` 0 takes a free one. Raises UserError when `run_dir` is not a run directory or the port is taken.
    """
    read_run(run_dir)

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").partition(":")[0]
            if self.path != "/" or name not in NAMES:
                self.send_error(404)
                return
            try:
                body, status = page(read_run(run_dir), live_s=REFRESH_S).encode(), 200
            except UserError as error:  # a row that is being written, or a run that was moved
                body, status = str(error).encode(), 503
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            with suppress(OSError):  # the reader has gone, or does not read
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal shows the address."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--port {port} cannot be used ({reason}); leave --port out to take a free one") from None


def serve(run_dir: Path, port: int) -> None:
    """Serve until interrupted."""
    with server_of(run_dir, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ shows {run_dir}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
