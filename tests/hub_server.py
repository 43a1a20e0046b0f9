"""A local server that speaks as much of the Hub's API as reading a model needs, and counts what it sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/?]+)")
_BLOCK = 1 << 20


@dataclass(kw_only=True)
class Repo:
    """What the server has of one repository.

    Attributes:
        commits: the directory of files of each commit, by its hash.
        refs: commit by the name of a branch or tag.
        is_gated: whether files are refused to whoever has no token.
        names: further names that the listing states, which no honest server would.
    """

    commits: Mapping[str, Path]
    refs: dict[str, str]
    is_gated: bool = False
    names: tuple[str, ...] = ()


@dataclass
class Hub:
    """A running server.

    Attributes:
        repos: by `org/name`; may be changed while it runs.
        asked: method and path of each request, in order.
        sent: bytes of every answer's body.
        answers_ranges: whether it does.
        is_cut: whether the connection breaks half way through whatever is longer than 1 kB and asked for whole.
    """

    repos: dict[str, Repo]
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    answers_ranges: bool = True
    is_cut: bool = False

    def __post_init__(self) -> None:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """Begin to count anew."""
        self.asked, self.sent = [], 0

    def downloads(self, name: str) -> int:
        """How many times the data of a file was asked for, in whole or in part."""
        return sum(1 for line in self.asked if line.startswith("GET ") and line.split()[1].endswith(f"/{name}"))

    def _answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        with self._lock:
            self.asked.append(f"{request.command} {request.path} {request.headers.get('Range', '')}".strip())
        wanted = _RESOLVE.fullmatch(request.path) or _INFO.match(request.path)
        repo = None if wanted is None else self.repos.get(wanted["repo"])
        if wanted is None or repo is None:
            return self._error(request, 404, "RepoNotFound", with_body)
        revision = unquote(wanted["revision"])
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._error(request, 404, "RevisionNotFound", with_body)
        folder = repo.commits[commit]
        if "file" not in wanted.re.groupindex:
            names = [*(path.name for path in sorted(folder.iterdir())), *repo.names]
            sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
            siblings = [{"rfilename": name, "size": sizes.get(name, 1), "blobId": "0" * 40} for name in names]
            body = json.dumps({"id": wanted["repo"], "modelId": wanted["repo"], "sha": commit, "siblings": siblings})
            return self._send(request, 200, {"Content-Type": "application/json"}, body.encode(), with_body)
        if repo.is_gated and "Authorization" not in request.headers:
            return self._error(request, 401, "GatedRepo", with_body)
        file = folder / unquote(wanted["file"])
        if not file.is_file():
            return self._error(request, 404, "EntryNotFound", with_body, {"X-Repo-Commit": commit})
        return self._file(request, file, commit, with_body)

    def _file(self, request: BaseHTTPRequestHandler, file: Path, commit: str, with_body: bool) -> None:
        size = file.stat().st_size
        etag = hashlib.sha256(f"{commit}/{file.name}/{size}".encode()).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if file.suffix == ".safetensors":
            headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"'}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")) if self.answers_ranges else None
        if found is None:
            return self._send(request, 200, headers, file, with_body, 0, size)
        start, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return self._send(request, 206, headers, file, with_body, start, end)

    def _error(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        code: str | None,
        with_body: bool,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        named = {} if code is None else {"X-Error-Code": code, "X-Error-Message": code}
        self._send(request, status, {**named, **(headers or {})}, b"{}", with_body)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: Mapping[str, str],
        body: bytes | Path,
        with_body: bool,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        end = len(body) if isinstance(body, bytes) else end
        assert end is not None
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(end - start))
        request.end_headers()
        if not with_body:
            return
        if self.is_cut and status == 200 and end > 1000:
            request.close_connection, end = True, end // 2
        if isinstance(body, bytes):
            request.wfile.write(body)
            with self._lock:
                self.sent += len(body)
            return
        with body.open("rb") as file:
            file.seek(start)
            while start < end and (block := file.read(min(_BLOCK, end - start))):
                request.wfile.write(block)
                start += len(block)
                with self._lock:
                    self.sent += len(block)
