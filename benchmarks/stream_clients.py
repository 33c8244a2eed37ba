"""Clients of ``serving.py``, in a process of their own: they take no time of the server's interpreter.

Reads a job from standard input: the server's address, messages of each chat, number of clients, fields of all requests.
Each client sends its next request as soon as it has the last response. Writes what they got to standard output.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def read_stream(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Send one request; return its text, its number of tokens, and the seconds to its first text."""
    body = json.dumps({**fields, "stream": True}).encode()
    started, first, texts, num_tokens = time.perf_counter(), None, [], 0
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - started
                    texts.append(text)
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return {"text": "".join(texts), "num_tokens": num_tokens, "first_seconds": first or 0.0}


def main() -> None:
    job = json.load(sys.stdin)
    requests = [{**job["fields"], "messages": messages} for messages in job["chats"]]
    started = time.perf_counter()
    with ThreadPoolExecutor(job["clients"]) as pool:
        responses = list(pool.map(lambda fields: read_stream(job["url"], fields), requests))
    json.dump({"seconds": time.perf_counter() - started, "responses": responses}, sys.stdout)


if __name__ == "__main__":
    main()
