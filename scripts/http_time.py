#!/usr/bin/env python
"""The cost of HTTP: time to first token and tokens/s through the server and offline, with one engine in the same run.

    python scripts/http_time.py qwen3-8b
    python scripts/http_time.py smollm2-135m --repeats 50 --new-tokens 64

Prints one JSON object. `first_ms`: from a prompt of one token to its first token, with one caller; median and 99th
percentile. `http` sends requests over one connection, `offline` calls `LLM.submit`. `tokens_per_s`: `--concurrency`
callers at once, each reading a stream. The client is a separate process. Weights are random, since no value changes how
long a step takes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmark.report import latency_summary

from distmk import LLM, SamplingParams
from distmk.backends.defaults import BACKENDS
from distmk.cli.exit_status import run_main
from distmk.server import run
from distmk.server.config import ServerConfig

PROMPT = [7]
MODEL = "model"
HEADERS = {"content-type": "application/json"}


def body(num_tokens: int, stream: bool) -> bytes:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}
    return json.dumps({"model": MODEL, "prompt": PROMPT, "stream": stream, **greedy}).encode()


def first_token_http(port: int, repeats: int) -> list[float]:
    """Milliseconds of each request."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    asked = body(1, stream=True)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", asked, HEADERS)
        answer = connection.getresponse()
        answer.read(16)
        times.append(1e3 * (time.perf_counter() - began))
        answer.read()
        time.sleep(0.005)
    return times


def first_token_offline(llm: LLM, repeats: int) -> list[float]:
    """Milliseconds of each request."""
    came, times = threading.Event(), []
    for _ in range(repeats):
        came.clear()
        began = time.perf_counter()
        llm.submit(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True), lambda _: came.set())
        came.wait()
        times.append(1e3 * (time.perf_counter() - began))
        time.sleep(0.005)
    return times


def read_streams(port: int, concurrency: int, num_tokens: int) -> float:
    """Seconds until all streams of tokens have been read."""
    asked = body(num_tokens, stream=True)
    lines = ["POST /v1/completions HTTP/1.1", "host: a", "connection: close", f"content-length: {len(asked)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    request = "\r\n".join([*lines, "", ""]).encode() + asked
    with selectors.DefaultSelector() as selector:
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(concurrency)]
        began = time.perf_counter()
        for connection in connections:
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj  # type: ignore[assignment]
                if not connection.recv(1 << 16):
                    selector.unregister(connection)
                    connection.close()
    return time.perf_counter() - began


def generate_offline(llm: LLM, concurrency: int, num_tokens: int) -> float:
    """Seconds until all tokens have arrived."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([PROMPT] * concurrency, params)
    return time.perf_counter() - began


def in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work`, run in a process that does nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def measure(llm: LLM, port: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The results to print."""
    size = (arguments.concurrency, arguments.new_tokens)
    first_token_offline(llm, 5)
    in_a_process(first_token_http, port, 5)
    offline, over_http = (
        first_token_offline(llm, arguments.repeats),
        in_a_process(first_token_http, port, arguments.repeats),
    )
    seconds = [(generate_offline(llm, *size), in_a_process(read_streams, port, *size)) for _ in range(3)]
    rates = [round(size[0] * size[1] / min(each), 1) for each in zip(*seconds, strict=True)]
    return {
        "model": arguments.model,
        "backend": llm.backend,
        "first_ms": {"offline": latency_summary(offline, 3), "http": latency_summary(over_http, 3)},
        "concurrency": arguments.concurrency,
        "tokens_per_s": {"offline": rates[0], "http": rates[1], "share": round(rates[1] / rates[0], 3)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a preset, as of `distmk generate`")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    options = {"backend": arguments.backend, "load_format": "dummy", "max_model_len": 1024}
    bound = run.bind("127.0.0.1", 0)
    with LLM(arguments.model, tensor_parallel_size=arguments.ranks, idle_exit_s=None, followed=True, **options) as llm:
        server = run.Server(llm, ServerConfig(MODEL), bound)
        serving = threading.Thread(target=server.run, args=([bound],))
        serving.start()
        try:
            print(json.dumps(measure(llm, bound.getsockname()[1], arguments)))
        finally:
            server.should_exit = server.cuts_off = True
            serving.join()
    return 0


if __name__ == "__main__":
    run_main(main)
