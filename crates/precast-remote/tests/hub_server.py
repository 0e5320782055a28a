"""A Hub of this machine: the endpoints that `precast-remote` and `huggingface_hub` use, over one repository,
`org/models`.

    hub_server.py FOLDER PORT

Its state is in FOLDER, so that it goes on after it was killed. The token is `secret`. Large files lie on a host of
their own (PORT + 1), which refuses requests that have a token, as a storage with signed URLs does.

`PUT /test/SETTING` with a number as body changes what it does:

| setting | |
|---|---|
| `page` | files in a page of a tree |
| `part` | large files come in parts of so many bytes |
| `limit` | more bytes are a large file |
| `puts` | large files that are taken; the next ones wait for ever |
| `busy` | requests that are answered with 503 |
| `cut` | files that break off in the middle |
| `lost` | commits that are made, and answered with 503 |
| `moved` | commits before which somebody else commits |
| `wait` | commits that wait until somebody else has committed |

`GET /test/log` has one line for each request so far.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

FOLDER, PORT = Path(sys.argv[1]), int(sys.argv[2])
HUB, STORAGE = f"http://127.0.0.1:{PORT}", f"http://127.0.0.1:{PORT + 1}"
REPO = "org/models"
SETTINGS = {"page": 1000, "part": 0, "limit": 10 << 20, "puts": 1 << 30}
SETTINGS |= {"busy": 0, "cut": 0, "lost": 0, "moved": 0, "wait": 0}
LOCK = threading.RLock()
LOG = []


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{threading.get_ident()}")
    new.write_bytes(data)
    os.replace(new, path)


def blob(oid: str) -> Path:
    return FOLDER / "blobs" / oid


def refs() -> dict:
    return json.loads((FOLDER / "refs.json").read_text())


def commit(branch: str, files: dict, parent: str | None, message: str) -> str:
    """Makes a commit of these files, and moves the branch to it."""
    text = json.dumps({"files": files, "parent": parent, "message": message})
    oid = hashlib.sha1(text.encode()).hexdigest()
    write(FOLDER / "commits" / oid, text.encode())
    write(FOLDER / "refs.json", json.dumps({**refs(), branch: oid}).encode())
    return oid


def files_of(oid: str) -> dict:
    return json.loads((FOLDER / "commits" / oid).read_text())["files"]


def resolve(revision: str) -> str | None:
    """Returns the commit of a branch, a tag or a commit."""
    known = refs()
    oid = known.get(revision) or known.get(f"tag:{revision}")
    if oid is None and re.fullmatch("[0-9a-f]{40}", revision) and (FOLDER / "commits" / revision).exists():
        oid = revision
    return oid


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", headers: Any = ()) -> None:
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers)


def count(setting: str) -> bool:
    """Counts a setting down to zero; returns whether there was something left."""
    with LOCK:
        left = SETTINGS[setting]
        SETTINGS[setting] = max(0, left - 1)
        return left > 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, data: Any = b"", status: int = 200, headers: Any = (), cut: bool = False) -> None:
        if not isinstance(data, bytes):
            data = json.dumps(data).encode()
        self.send_response(status)
        headers = {"Content-Length": len(data), **dict(headers)}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.parts = [unquote(part) for part in url.path.strip("/").split("/")]
        data = self.body()
        if self.parts[0] != "test":
            LOG.append(f"{self.command} {self.path} {len(data)}")
        try:
            self.route(data)
        except Refused as refused:
            headers = {**refused.headers}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            headers["X-Error-Message"] = refused.message
            self.answer({"error": refused.message}, refused.status, headers)

    do_GET = do_HEAD = do_PUT = do_POST = handle_any


class Server(ThreadingHTTPServer):
    """A server that says nothing of clients that go away."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass


class Storage(Handler):
    """Where large files lie."""

    def route(self, data: bytes) -> None:
        if "Authorization" in self.headers:
            raise Refused(400, message="Only one auth mechanism allowed")
        oid = self.parts[-1]
        if self.command == "PUT" and not count("puts"):
            time.sleep(3600)
        if self.command == "PUT" and len(self.parts) == 3:
            name = f"{oid}.{self.parts[1]}"
            write(FOLDER / "parts" / name, data)
            return self.answer(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
        if self.command == "PUT":
            if hashlib.sha256(data).hexdigest() != oid:
                raise Refused(400, message="BadDigest")
            write(blob(oid), data)
            return self.answer()
        self.file(blob(oid).read_bytes())

    def file(self, data: bytes) -> None:
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(begin[1]) if begin else 0
        status = 206 if begin else 200
        self.answer(data[begin:], status, {"ETag": '"x"'}, cut=self.command == "GET" and count("cut"))


class Hub(Storage):
    def route(self, data: bytes) -> None:
        parts = self.parts
        if parts[0] == "test":
            return self.test(data)
        if count("busy"):
            raise Refused(503, message="busy", headers={"Retry-After": "0"})
        token = self.headers.get("Authorization")
        if token not in (None, "Bearer secret"):
            raise Refused(401, message="Invalid credentials in Authorization header")
        if parts[:2] == ["api", "models"]:
            repo, what, rest = "/".join(parts[2:4]), parts[4:5], parts[5:]
        elif parts[2:3] == ["resolve"]:
            repo, what, rest = "/".join(parts[:2]), ["resolve"], parts[3:]
        else:
            repo, what, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:5], parts[5:]
        if repo != REPO:
            status = 404 if token else 401
            raise Refused(status, "RepoNotFound", "Repository not found")
        if self.command == "POST" and not token:
            raise Refused(401, message="Invalid username or password.")
        if what == ["info", "lfs", "objects"]:
            return self.batch(json.loads(data))
        name = what[0] if what else "revision"
        if name == "refs":
            return self.refs()
        if name == "lfs":
            return self.lfs(rest[0], json.loads(data))
        oid = resolve(rest[0] if rest else "main")
        if oid is None:
            raise Refused(404, "RevisionNotFound", "Invalid rev id")
        if name == "revision":
            siblings = [{"rfilename": path} for path in files_of(oid)]
            return self.answer({"id": REPO, "sha": oid, "siblings": siblings})
        if name == "tree":
            return self.tree(oid, "/".join(rest[1:]))
        if name == "resolve":
            return self.resolve(oid, "/".join(rest[1:]))
        if name == "preupload":
            return self.preupload(oid, json.loads(data))
        if name == "commit":
            return self.commit(rest[0], data)
        raise Refused(404, message=f"no {name}")

    def test(self, data: bytes) -> None:
        if self.command == "GET":
            return self.answer("\n".join(LOG).encode())
        SETTINGS[self.parts[1]] = int(data)
        self.answer()

    def refs(self) -> None:
        all = refs().items()

        def ref(kind: str, name: str, oid: str) -> dict:
            return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid}

        branches = [ref("heads", name, oid) for name, oid in all if not name.startswith("tag:")]
        tags = [ref("tags", name[4:], oid) for name, oid in all if name.startswith("tag:")]
        self.answer({"branches": branches, "tags": tags, "converts": []})

    def tree(self, oid: str, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        inside = {path: file for path, file in sorted(files_of(oid).items()) if path.startswith(prefix)}
        if folder and not inside:
            raise Refused(404, "EntryNotFound", "no such folder")
        begin = int(self.query.get("cursor", ["0"])[0])
        entries = []
        for path, file in list(inside.items())[begin : begin + SETTINGS["page"]]:
            entry = {"type": "file", "path": path, "oid": file["oid"], "size": file["size"]}
            if file["large"]:
                entry["lfs"] = {"oid": file["oid"], "size": file["size"], "pointerSize": 130}
            entries.append(entry)
        headers, end = {}, begin + len(entries)
        if end < len(inside):
            at = f"{HUB}{quote(urlsplit(self.path).path, safe='/%')}?recursive=true&cursor={end}"
            headers["Link"] = f'<{at}>; rel="next"'
        self.answer(entries, headers=headers)

    def resolve(self, oid: str, path: str) -> None:
        file = files_of(oid).get(path)
        headers = {"X-Repo-Commit": oid}
        if file is None:
            raise Refused(404, "EntryNotFound", "Entry not found", headers)
        if not file["large"]:
            data = blob(file["oid"]).read_bytes()
            headers["ETag"] = f'"{file["oid"]}"'
            return self.answer(data, headers=headers, cut=self.command == "GET" and count("cut"))
        headers |= {"Location": f"{STORAGE}/{file['oid']}?signature=x", "X-Linked-Size": file["size"]}
        headers["X-Linked-Etag"] = f'"{file["oid"]}"'
        self.answer(b"", 302, headers)

    def preupload(self, oid: str, asked: dict) -> None:
        files = files_of(oid)
        answers = []
        for file in asked["files"]:
            base64.b64decode(file["sample"], validate=True)
            known = files.get(file["path"], {}).get("oid")
            is_large = file["path"].endswith(".zst") or file["size"] > SETTINGS["limit"]
            mode = "lfs" if is_large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known})
        self.answer({"files": answers})

    def batch(self, asked: dict) -> None:
        assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256", asked
        objects = []
        for item in asked["objects"]:
            oid, size, part = item["oid"], item["size"], SETTINGS["part"]
            item = {"oid": oid, "size": size}
            if not blob(oid).exists():
                verify = {"href": f"{HUB}/api/models/{REPO}/lfs/verify"}
                upload = {"href": f"{STORAGE}/{oid}?signature=x"}
                if part and size > part:
                    numbers = range(1, 1 - (-size // part))
                    header = {str(n): f"{STORAGE}/part/{n}/{oid}" for n in numbers}
                    upload = {"href": f"{HUB}/api/models/{REPO}/lfs/complete"}
                    upload["header"] = {"chunk_size": str(part), **header}
                item["actions"] = {"upload": upload, "verify": verify}
            objects.append(item)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs(self, what: str, asked: dict) -> None:
        oid = asked["oid"]
        if what == "complete":
            data = b""
            for n, part in enumerate(asked["parts"]):
                one = (FOLDER / "parts" / f"{oid}.{n + 1}").read_bytes()
                tag = f'"{hashlib.md5(one).hexdigest()}"'
                if part != {"partNumber": n + 1, "etag": tag}:
                    raise Refused(400, message="InvalidPart")
                data += one
            if hashlib.sha256(data).hexdigest() != oid:
                raise Refused(400, message="BadDigest")
            write(blob(oid), data)
        elif not blob(oid).exists() or blob(oid).stat().st_size != asked["size"]:
            raise Refused(404, message="Object not found")
        self.answer({})

    def commit(self, branch: str, data: bytes) -> None:
        lines = [json.loads(line) for line in data.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if count("wait"):
            begun = refs()
            while refs() == begun:
                time.sleep(0.02)
        with LOCK:
            head = refs().get(branch)
            if count("moved"):
                other = git_oid(str(time.time()).encode())
                write(blob(other), b"other")
                files = {**files_of(head), "README.md": {"oid": other, "size": 5, "large": False}}
                head = commit(branch, files, head, "somebody else")
            if head is None:
                raise Refused(403, message="not a branch")
            if header.get("parentCommit", head) != head:
                raise Refused(412, message="A commit has happened since. Please refresh and try again.")
            files = files_of(head)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    small = base64.b64decode(value["content"])
                    oid = git_oid(small)
                    write(blob(oid), small)
                    files[value["path"]] = {"oid": oid, "size": len(small), "large": False}
                elif line["key"] == "lfsFile":
                    if not blob(value["oid"]).exists():
                        raise Refused(400, message=f"no LFS object {value['oid']}")
                    size = blob(value["oid"]).stat().st_size
                    files[value["path"]] = {"oid": value["oid"], "size": size, "large": True}
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            oid = commit(branch, files, head, header["summary"])
        if count("lost"):
            raise Refused(503, message="busy", headers={"Retry-After": "0"})
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{HUB}/{REPO}/commit/{oid}"})


if not (FOLDER / "refs.json").exists():
    write(FOLDER / "refs.json", b"{}")
    rules = b"*.zst filter=lfs diff=lfs merge=lfs -text\n"
    write(blob(git_oid(rules)), rules)
    start = {".gitattributes": {"oid": git_oid(rules), "size": len(rules), "large": False}}
    first = commit("main", start, None, "initial commit")
    write(FOLDER / "refs.json", json.dumps({"main": first, "tag:v1": first}).encode())
storage = Server(("127.0.0.1", PORT + 1), Storage)
threading.Thread(target=storage.serve_forever, daemon=True).start()
Server(("127.0.0.1", PORT), Hub).serve_forever()
