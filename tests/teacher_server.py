"""A server in a thread that answers like SGLang's native HTTP API, from a real model.

Its answers were compared with those of SGLang 0.5.21.

What goes wrong is told by `faults`, one a request to /generate; then it serves.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TeacherServer(ThreadingHTTPServer):
    """`url` is where it listens; `questions` are the bodies of all requests to /generate."""

    daemon_threads = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.tokenizer = model, tokenizer
        self.name: str | None = "models/teacher"
        self.information = "/model_info"
        self.faults: list[str] = []
        self.shows_text = True
        self.is_dead = False
        self.questions: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.released = threading.Event()
        """Lets go of the requests that hang."""
        self._lock = threading.Condition()
        self._now = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self, question: dict[str, Any]) -> str:
        with self._lock:
            self.questions.append(question)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self._lock.notify_all()
            return self.faults.pop(0) if self.faults else ""

    def wait_for(self, num_questions: int) -> None:
        """Until that many have come."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.questions) >= num_questions, 20)

    def leave(self) -> None:
        with self._lock:
            self._now -= 1

    @torch.no_grad()
    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """`meta_info` of the question, with the log-probs of a full forward."""
        ids, k = question["input_ids"], question.get("top_logprobs_num", 0)
        if max(ids) >= self.model.config.vocab_size:
            self.is_dead = True  # as SGLang is after a token that its model does not know
            raise IndexError
        logprobs_TV = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

        def entry(position: int | None, token: int) -> list[Any]:
            value = None if position is None else float(logprobs_TV[position, token])
            return [value, token, None]

        first = entry(None, ids[0])
        found = {"input_token_logprobs": [first, *(entry(t, i) for t, i in enumerate(ids[1:]))]}
        for found_T in found["input_token_logprobs"]:
            if found_T[1] == self.model.config.vocab_size - 1:
                found_T[1] = 0  # as SGLang does, here alone
        if k:
            tops = logprobs_TV.topk(k).indices.tolist()[:-1]
            found["input_top_logprobs"] = [
                None, *([entry(t, i) for i in row] for t, row in enumerate(tops))
            ]  # fmt: skip
        return {"text": "", "meta_info": found}


class _Handler(BaseHTTPRequestHandler):
    server: TeacherServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == self.server.information and self.server.name is not None:
            self._send(200, {"model_path": self.server.name})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize" and self.server.shows_text:
            found = [self.server.tokenizer.decode(ids) for ids in body["tokens"]]
            self._send(200, {"text": found})
            return
        if self.path != "/generate":
            self._send(404, {"detail": "Not Found"})
            return
        fault = self.server.next_fault(body)
        try:
            self._answer(body, fault)
        finally:
            self.server.leave()

    def _answer(self, body: dict[str, Any], fault: str) -> None:
        if fault.isdecimal():
            self._send(int(fault), {"error": f"fault {fault}"})
        elif fault == "dead" or self.server.is_dead:
            self.close_connection = True
        elif fault == "hang":
            self.server.released.wait(30)
            self.close_connection = True
        elif fault == "text":
            self._send(200, "not JSON", raw=True)
        else:
            found = self.server.answer(body)
            self._break(found["meta_info"], fault)
            self._send(200, found, cut=fault == "cut", is_chunked=fault == "chunked")

    def _break(self, meta: dict[str, Any], fault: str) -> None:
        entries = meta["input_token_logprobs"]
        if fault == "short":
            entries.pop()
        elif fault == "other token":
            entries[2][1] += 1
        elif fault == "null":
            entries[-1][0] = None
        elif fault == "few":
            meta["input_top_logprobs"][-1].pop()
        elif fault == "unknown token":
            meta["input_top_logprobs"][-1][0][1] = 10_000
        elif fault == "no log-probs":
            meta.clear()

    def _send(
        self,
        status: int,
        found: Any,
        *,
        raw: bool = False,
        cut: bool = False,
        is_chunked: bool = False,
    ) -> None:
        data = found.encode() if raw else json.dumps(found).encode()
        self.send_response(status)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            data = (
                b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (data[:7], data[7:])) + b"0\r\n\r\n"
            )
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut

    def log_message(self, format: str, *given: Any) -> None:
        """Tests are quiet."""


@contextmanager
def serving(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[TeacherServer]:
    """The server, until the block ends."""
    server = TeacherServer(model, tokenizer or tiny_tokenizer())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
