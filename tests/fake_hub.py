"""The few answers of the Hugging Face hub that reading a data set needs, on loopback, with faults on demand."""

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves ``root`` as allenai/c4.

    Attributes:
        url: to be set as HF_ENDPOINT.
        fail_every: every n-th request for content is answered 503; 0 for none.
        damaged: paths whose content is served with a wrong byte.
        requests: counts by kind.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.fail_every, self.damaged, self.requests = root, 0, set(), Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def files(self):
        return sorted(p.relative_to(self.root).as_posix() for p in (self.root / "en").iterdir())

    def answer(self, request, body):
        path = request.path.split("?")[0]
        if path.startswith("/api/datasets/allenai/c4/tree/"):
            self.requests["tree"] += 1
            return self.send(request, 200, json.dumps([self.entry(name) for name in self.files()]).encode(), {}, body)
        if path.startswith("/api/datasets/allenai/c4"):
            self.requests["info"] += 1
            info = {"id": "allenai/c4", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files()]}
            return self.send(request, 200, json.dumps(info).encode(), {}, body)
        match = re.fullmatch(rf"/datasets/allenai/c4/resolve/{COMMIT}/(.+)", path)
        if not match or match[1] not in self.files():
            return self.send(request, 404, b"", {}, body)
        self.requests["content"] += 1
        if self.fail_every and self.requests["content"] % self.fail_every == 0:
            return self.send(request, 503, b"busy", {}, body)
        content = (self.root / match[1]).read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if match[1] in self.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self.send(request, 206, content[first : last + 1], headers, body)
        return self.send(request, 200, content, headers, body)

    def entry(self, name):
        content = (self.root / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        size = len(content)
        return {
            "type": "file",
            "path": name,
            "size": size,
            "oid": sha256[:40],
            "lfs": {"oid": sha256, "size": size, "pointerSize": 1},
        }

    @staticmethod
    def send(request, status, content, headers, body):
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content)), "Content-Type": "application/json"}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(content)
