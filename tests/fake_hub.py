"""A local server that gives the few answers of the Hugging Face hub that reading needs,
with faults on demand.
"""

import contextlib
import gzip
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def serving(root, repository, monkeypatch, caches):
    """A hub that this process uses, with its caches in a folder, and hardly a pause
    between requests.
    """
    hub = FakeHub(root, repository)
    for name, value in {
        "huggingface_hub.constants.ENDPOINT": hub.url,
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE": hub.url
        + "/{repo_id}/resolve/{revision}/{filename}",
        "huggingface_hub.constants.HF_HUB_CACHE": str(caches / "hub"),
        "huggingface_hub.constants.HF_HUB_DISABLE_XET": True,
        "datasets.config.HF_ENDPOINT": hub.url,
        "datasets.config.HF_UPDATE_DOWNLOAD_COUNTS": False,
        "datasets.config.DOWNLOADED_DATASETS_PATH": str(caches / "downloads"),
        "titan_disp.retry.FIRST_PAUSE": 0.01,
    }.items():
        monkeypatch.setattr(name, value)
    yield hub
    hub.close()


class FakeHub:
    """Serves ``root`` as a data set, and the folders in ``datasets`` under their names,
    at COMMIT.
    """

    def __init__(self, root: Path, repository: str = "allenai/c4") -> None:
        self.datasets = {repository: root}
        self.tagged = {}  # folders of data sets at OLDER, the tag v1.0
        self.gated = set()  # data sets to which nobody has access
        self.damaged = set()  # paths whose content is served with one wrong byte
        # answers to the next requests of a kind, list or resolve, as (status, headers);
        # 200 is none
        self.faults = {}
        # Whether a proxy sends whole files, packed by gzip without being asked to
        self.packed = False
        self.trickle = 0.0  # seconds before every ten bytes of an answer
        # the connection breaks after this many bytes of an answer; 0 for never
        self.cut = 0
        # answers hold at most this many bytes, and say so; 0 for no limit
        self.short = 0
        self.stall = 0  # nothing more is sent after this many bytes; 0 for never
        self.ignore_range = False  # whether whole files are sent, whatever is asked for
        self.requests = Counter()  # number of requests by kind
        self.ranges = []  # (path, Range) of every GET for content
        self.closing = threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=self.command == "GET")

            do_HEAD = do_GET

            def handle(self):
                # the client has closed the connection early
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, args=(0.02,), daemon=True
        ).start()

    def close(self):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    @staticmethod
    def files(root):
        return sorted(
            p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()
        )

    def faulty(self, request, kind, body):
        """Whether the next answer of this kind is a fault, which is sent."""
        status, headers = (
            self.faults[kind].pop(0) if self.faults.get(kind) else (200, {})
        )
        if status != 200:
            self.requests["refused"] += 1
            self.send(request, status, b"", headers, body)
        return status != 200

    def answer(self, request, body):
        """The paths are /api/datasets/OWNER/NAME and below it /revision/R,
        /tree/C/FOLDER and /auth-check; and those of files.
        """

        def tell(status, code, found=None):
            content, headers = (
                (json.dumps(found).encode(), {})
                if found
                else (b"", {"X-Error-Code": code})
            )
            return self.send(request, 200 if found else status, content, headers, body)

        path, _, query = unquote(request.path).partition("?")
        pattern = r"(?:/api)?/datasets/([^/]+/[^/]+)/?([^/]*)/?([^/]*)/?(.*)"
        repository, what, revision, name = re.fullmatch(pattern, path).groups()
        if repository not in self.datasets:
            return tell(404, "RepoNotFound")
        if what != "resolve" and self.faulty(request, "list", body):
            return None
        commits = {"": COMMIT, "main": COMMIT, COMMIT: COMMIT}
        commit = (
            commits
            | ({"v1.0": OLDER, OLDER: OLDER} if repository in self.tagged else {})
        ).get(revision)
        root = self.tagged[repository] if commit == OLDER else self.datasets[repository]
        if what == "tree":
            self.requests["tree"] += 1
            return tell(
                404,
                "EntryNotFound",
                self.tree(root, name, "recursive=true" in query.lower()),
            )
        if what in ("", "revision"):
            self.requests["info"] += 1
            info = {
                "id": repository,
                "sha": commit,
                "gated": "auto" if repository in self.gated else False,
            }
            return tell(404, "RevisionNotFound", commit and info)
        if repository in self.gated:  # for every request, including auth-check
            return tell(401, "GatedRepo")
        if revision != commit or name not in self.files(root):
            return tell(404, "EntryNotFound")
        return self.content(request, root, commit, name, body)

    def content(self, request, root, commit, path, body):
        self.requests["content"] += 1
        if body:
            self.ranges.append((path, request.headers.get("Range")))
        if self.faulty(request, "resolve", body):
            return
        content = (root / path).read_bytes()
        status = 200
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path in self.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if self.packed:
            content = gzip.compress(content)
            headers = {"Content-Encoding": "gzip"}
        elif wanted and not self.ignore_range:
            first = int(wanted[1])
            size = len(content)
            last = min(
                int(wanted[2] or size - 1),
                size - 1,
                first + self.short - 1 if self.short else size,
            )
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            content = content[first : last + 1]
            status = 206
        self.send(
            request, status, content, headers, body, self.cut or self.stall or None
        )

    def tree(self, root, folder, recursive):
        found = sorted(
            (root / folder).rglob("*") if recursive else (root / folder).glob("*")
        )
        folder = {"type": "directory", "oid": "0" * 40}
        names = [(path.relative_to(root).as_posix(), path.is_file()) for path in found]
        return [
            self.entry(root, name) if is_file else folder | {"path": name}
            for name, is_file in names
        ]

    @staticmethod
    def entry(root, name):
        content = (root / name).read_bytes()
        size = len(content)
        lfs = hashlib.sha256(content).hexdigest()
        about = {"oid": lfs, "size": size, "pointerSize": 1}
        return {
            "type": "file",
            "path": name,
            "size": size,
            "oid": lfs[:40],
            "lfs": about,
        }

    def send(self, request, status, content, headers, body, sent=None):
        """Send an answer, and break or stall the connection after ``sent`` bytes of the
        content unless it is None.
        """
        request.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(content)),
            "Content-Type": "application/json",
        }.items():
            request.send_header(name, value)
        request.end_headers()
        if body and self.trickle:
            for i in range(0, len(content), 10):
                self.closing.wait(self.trickle)
                request.wfile.write(content[i : i + 10])
        elif body:
            request.wfile.write(content[:sent])
        if body and sent and sent < len(content):
            if self.stall:
                self.closing.wait(30)
            request.close_connection = True
