"""A server in a thread of the test: it speaks vLLM's or SGLang's protocol, truly or with one thing wrong."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch

NAME = "run-0"
Answer = tuple[list[int], list[float], str]
"""Token ids, log-probabilities, finish reason of one response."""
Answers = Callable[[list[int], dict[str, Any]], list[Answer]]
"""(prompt, settings `n`, `max_tokens`, `temperature`) -> responses."""


def constant_answers(prompt: list[int], settings: dict[str, Any]) -> list[Answer]:
    """Responses of one token, 1, with the log-probability -1: their text does not matter."""
    return [([1], [-1.0], "length" if settings["max_tokens"] == 1 else "stop")] * settings["n"]


@dataclass
class Policy:
    """Samples from a checkpoint, by transformers, on the CPU; the same numbers as any engine, but for rounding."""

    directory: Path
    temperature: float | None = None
    """Used instead of the one that is asked for."""
    top_k: int = 0
    raw: bool = False
    """Whether log-probabilities are those of the whole vocabulary at temperature 1."""
    dtype: torch.dtype = torch.float32
    changed: Callable[[torch.nn.Module], None] = lambda model: None

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        self.changed(model)
        self.model: Any = model.to(self.dtype)
        self.ends = self.model.config.eos_token_id
        self.generator = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, prompt: list[int], settings: dict[str, Any]) -> list[Answer]:
        with self.lock:
            return [self._response(prompt, settings) for _ in range(settings["n"])]

    def _response(self, prompt: list[int], settings: dict[str, Any]) -> Answer:
        ids, logprobs = list(prompt), []
        for _ in range(settings["max_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            drawn = logits / (self.temperature or settings["temperature"])
            if self.top_k:
                drawn = drawn.masked_fill(drawn < drawn.topk(self.top_k).values[-1], -torch.inf)
            token = int(torch.multinomial(drawn.softmax(-1), 1, generator=self.generator))
            logprobs.append(float((logits if self.raw else drawn).log_softmax(-1)[token]))
            ids.append(token)
            if token == self.ends:
                return ids[len(prompt) :], logprobs, "stop"
        return ids[len(prompt) :], logprobs, "length"


@dataclass
class Fake:
    """What the server does; a test changes it while the server runs."""

    dialect: Literal["vllm", "sglang", "openai"] = "vllm"
    answers: Answers = constant_answers
    name: str = NAME
    key: str = ""
    mend: Callable[[Any], Any] = lambda body: body
    """Changes the JSON of an answer."""
    instead: Callable[[Handler], bool] = lambda handler: False
    """Answers a request for responses instead of the server; False lets the server."""
    write: Callable[[Handler, bytes], object] = lambda handler, content: handler.wfile.write(content)
    """Sends the body of a reply."""
    prompts: list[list[int]] = field(default_factory=list)
    """All prompts that were asked for."""
    url: str = ""

    def json(self, path: str, body: dict[str, Any]) -> Any:
        if self.dialect == "sglang":
            settings = body["sampling_params"] | {"max_tokens": body["sampling_params"]["max_new_tokens"]}
            prompt = body["input_ids"]
        else:
            settings, prompt = body, body["prompt"]
        self.prompts.append(prompt)
        answers = self.answers(prompt, settings)
        if self.dialect == "sglang":
            return self.mend([self._sglang(prompt, *answer) for answer in answers])
        rows = [self._completion(number, prompt, *answer) for number, answer in enumerate(answers)]
        return self.mend({"object": "text_completion", "model": body["model"], "choices": rows})

    @staticmethod
    def _sglang(prompt: list[int], ids: list[int], logprobs: list[float], reason: str) -> dict[str, Any]:
        entries = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        meta = {"finish_reason": {"type": reason}, "prompt_tokens": len(prompt), "output_token_logprobs": entries}
        return {"text": "", "output_ids": ids, "meta_info": meta}

    @staticmethod
    def _completion(
        number: int, prompt: list[int], ids: list[int], logprobs: list[float], reason: str
    ) -> dict[str, Any]:
        named = {"tokens": [f"token_id:{token}" for token in ids], "token_logprobs": logprobs}
        row = {"index": number, "text": "", "finish_reason": reason, "logprobs": named}
        return row | {"token_ids": ids, "prompt_token_ids": prompt}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        fake = self.fake
        known: dict[str, Any] = {"/v1/models": {"data": [{"id": fake.name, "max_model_len": 4096}]}}
        if fake.dialect == "sglang":
            known["/model_info"] = {"is_generation": True}
        if fake.dialect == "vllm":
            known["/version"] = {"version": "0.32.0"}
        if self.refuses_key():
            return
        self.send(200, known[self.path]) if self.path in known else self.send(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = "/generate" if self.fake.dialect == "sglang" else "/v1/completions"
        if self.refuses_key():
            return
        if self.path != path:
            self.send(404, {"error": "no such path"})
        elif path == "/v1/completions" and body["model"] != self.fake.name:
            self.send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        elif not self.fake.instead(self):
            self.send(200, self.fake.json(self.path, body))

    def refuses_key(self) -> bool:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self.send(401, {"error": "Unauthorized"})
            return True
        return False

    def send(self, status: int, value: Any) -> None:
        self.send_bytes(status, json.dumps(value).encode())

    def send_bytes(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.fake.write(self, content)

    def die(self) -> bool:
        """Cut the connection as a killed process's kernel does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
        return True

    def log_message(self, format: str, *arguments: Any) -> None:
        return


class Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # the client has left


@contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[Fake]:
    """Serve `fake` at `fake.url` in the block."""
    handler = type("Bound", (Handler,), {"fake": fake})
    server = Threads(("127.0.0.1", port), handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
