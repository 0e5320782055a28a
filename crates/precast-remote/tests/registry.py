"""A registry of one repository for tests: `registry.py FOLDER`, which prints its port. It believes its files.

blobs/HEX        a blob
documents/NAME   a document, by tag or digest
log              the requests, a line each
busy             how many requests are refused first
cut              how many bytes of a blob are sent before the connection ends
login            the password of `me`, if there is one
"""

import base64
import hashlib
import http.server
import json
import pathlib
import re
import sys
import threading
import urllib.parse

FOLDER = pathlib.Path(sys.argv[1])
BLOBS, DOCUMENTS = FOLDER / "blobs", FOLDER / "documents"
LOCK = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def is_busy(self) -> bool:
        with LOCK:
            with (FOLDER / "log").open("a") as log:
                log.write(f"{self.command} {self.path}\n")
            busy = FOLDER / "busy"
            left = int(busy.read_text()) if busy.exists() else 0
            busy.write_text(str(max(left - 1, 0)))
        return left > 0

    def serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        host = self.headers["Host"]
        if self.is_busy():
            return self.answer(503)
        login = FOLDER / "login"
        if login.exists():
            given = self.headers.get("Authorization", "")
            if url.path == "/token":
                user = base64.b64encode(b"me:" + login.read_bytes()).decode()
                good = given == f"Basic {user}" and query["scope"].startswith("repository:models:pull")
                return self.answer(200, b'{"token":"its-token"}') if good else self.answer(401, b"who are you?")
            if given != "Bearer its-token":
                realm = f'Bearer realm="http://{host}/token",service="test"'
                return self.answer(401, WWW_Authenticate=realm)
        if url.path == "/v2/":
            return self.answer(200)
        match = re.fullmatch(r"/v2/models/(blobs|manifests|tags)/(.*)", url.path)
        if not match:
            return self.answer(404)
        kind, name = match.groups()
        if kind == "tags":
            tags = sorted(path.name for path in DOCUMENTS.iterdir() if ":" not in path.name)
            after = [tag for tag in tags if tag > query.get("last", "")]
            more = {"Link": '</v2/>; rel="next"'} if len(after) > 2 else {}
            return self.answer(200, json.dumps({"tags": after[:2]}).encode(), **more)
        if name.startswith("uploads/"):
            if self.command == "POST":
                return self.answer(202, Location="/v2/models/blobs/uploads/1")
            hex_digest = query["digest"].removeprefix("sha256:")
            if hashlib.sha256(content).hexdigest() != hex_digest:
                return self.answer(400)
            (BLOBS / hex_digest).write_bytes(content)
            return self.answer(201, Location=f"/v2/models/blobs/sha256:{hex_digest}")
        path = BLOBS / name.removeprefix("sha256:") if kind == "blobs" else DOCUMENTS / name
        if self.command == "PUT":
            path.write_bytes(content)
            digest = "sha256:" + hashlib.sha256(content).hexdigest()
            (DOCUMENTS / digest).write_bytes(content)
            return self.answer(201, Location=f"/v2/models/manifests/{digest}")
        if not path.exists():
            return self.answer(404)
        if self.command == "DELETE":
            if (FOLDER / "keeps").exists():
                return self.answer(405)
            path.unlink()
            return self.answer(202)
        content = path.read_bytes()
        cut = FOLDER / "cut"
        if kind != "blobs" or self.command == "HEAD" or not cut.exists():
            return self.answer(200, content)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + int(cut.read_text())])
        self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve


BLOBS.mkdir()
DOCUMENTS.mkdir()
SERVER = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(SERVER.server_address[1], flush=True)
SERVER.serve_forever()
