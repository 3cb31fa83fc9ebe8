"""A stand-in for the Hugging Face hub's HTTP API: what an upload calls, in memory, on this machine."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TOKEN = "hf_" + "NobodysTokenAtAll" * 2
"""Looks like a token, and is none."""


@dataclass
class Repo:
    """A repository: its files by path, and the commit of each tag."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """What the stand-in holds, what it was asked, and how it answers instead when told to."""

    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    instead: dict[str, tuple[int, dict]] = field(default_factory=dict)
    url: str = ""

    def __enter__(self) -> "Hub":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def paths(self, method: str) -> list[str]:
        """The paths asked for with a method, in order."""
        return [path for asked, path in self.asked if asked == method]

    def answer(self, method: str, path: str, body: bytes, login: str) -> tuple[int, dict]:
        """Status and JSON of the answer."""
        self.asked.append((method, path))
        for ending, answer in self.instead.items():
            if path.endswith(ending):
                return answer
        if method == "PUT":  # to the store behind the hub, which knows no logins
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if login != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        said = json.loads(body) if body.startswith(b"{") and b"\n{" not in body else {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(f"{said['organization']}/{said['name']}", said)
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(each) for each in said["objects"]]}
        repo_id = "/".join(path.split("/")[3:5])
        repo, rest = self.repos.get(repo_id), path.split("/")[5:]
        if repo is None:
            return 404, {"error": "Repository not found"}
        return self._about(repo_id, repo, rest, said, body)

    def _create(self, repo_id: str, said: dict) -> tuple[int, dict]:
        known = repo_id in self.repos
        if not known:
            self.repos[repo_id] = Repo(said.get("private", False) or said.get("visibility") == "private")
        return 409 if known else 200, {"url": f"{self.url}/{repo_id}"}

    def _upload(self, wanted: dict) -> dict:
        if wanted["oid"] in self.objects:
            return wanted  # nothing to do
        return wanted | {"actions": {"upload": {"href": f"{self.url}/store/{wanted['oid']}"}}}

    def _about(self, repo_id: str, repo: Repo, rest: list[str], said: dict, body: bytes) -> tuple[int, dict]:
        head = repo.commits[-1] if repo.commits else "0" * 40
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": name} for name in repo.files]
            return 200, {"id": repo_id, "sha": head, "private": repo.private, "siblings": siblings}
        if rest[0] == "refs":
            tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": head}
            return 200, {"branches": [main], "converts": [], "tags": tags}
        if rest[0] == "preupload":
            return 200, {"files": [_mode(each) for each in said["files"]]}
        if rest[0] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines[1:]:
                value = line["value"]
                repo.files[value["path"]] = (
                    self.objects[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
                )
            repo.commits.append(hashlib.sha1(body).hexdigest())
            return 200, {"commitUrl": f"{self.url}/{repo_id}/commit/{repo.commits[-1]}", "commitOid": repo.commits[-1]}
        if rest[0] == "tag":
            taken = said["tag"] in repo.tags
            if not taken:
                repo.tags[said["tag"]] = rest[1]
            return 409 if taken else 200, {}
        return 404, {"error": "no such place"}


def _mode(file: dict) -> dict:
    large = file["path"].endswith((".safetensors", "tokenizer.json"))
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self._body()
            status, answer = hub.answer(
                self.command, urlsplit(self.path).path, body, self.headers.get("Authorization", "")
            )
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            if "error" in answer:
                self.send_header("X-Error-Message", answer["error"])
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *arguments) -> None:
            pass

    return Handler
