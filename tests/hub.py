"""A Hugging Face hub on this machine: it serves one model, in the hub's HTTP interface, on the loopback device."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

NAME = "someone/tiny"
FIRST, SECOND = "1" * 40, "2" * 40


@dataclass
class Hub:
    """What the hub holds and what was asked of it; tests change and read it."""

    files: Path
    """The model's directory; the same files at every commit."""
    refs: dict[str, str] = field(default_factory=lambda: {"main": FIRST, "v1": SECOND})
    gated: bool = False
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(files: Path) -> Iterator[Hub]:
    """A hub that serves `files` as the model NAME."""
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def used(files: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """`serving`, as the hub of this process, with its cache in `folder`, which becomes the current directory."""
    with serving(files) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.chdir(folder)
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        api, plain = f"/api/models/{NAME}/", f"/{NAME}/resolve/"
        if self.hub.gated:
            self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "no"})
        elif path.startswith(f"{api}revision/"):
            self._revision(path.rpartition("/")[2], body)
        elif path.startswith(f"{api}tree/"):
            names = sorted(one.name for one in self.hub.files.iterdir() if one.is_file())
            self._send(200, json.dumps([self._entry(name) for name in names]).encode(), body)
        elif path.startswith(plain):
            commit, _, name = path.removeprefix(plain).partition("/")
            content = (self.hub.files / name).read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            self._send(200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "none"})

    def _revision(self, asked: str, body: bool) -> None:
        commit = self.hub.refs.get(asked, asked)
        if len(commit) == 40:
            self._send(200, json.dumps({"id": NAME, "modelId": NAME, "sha": commit, "siblings": []}).encode(), body)
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "none"})

    def _entry(self, name: str) -> dict[str, object]:
        content = (self.hub.files / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
