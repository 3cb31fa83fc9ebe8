"""A stand-in for the Hugging Face hub: what an upload, a download and a job call, in memory, on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants

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
    jobs: list[dict] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    end: dict = field(default_factory=lambda: {"stage": "COMPLETED"})
    done: Callable[[], None] = lambda: None
    url: str = ""

    def __enter__(self) -> "Hub":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def alone(self, monkeypatch, folder: Path, token: str | None = TOKEN) -> None:
        """Let the hub's library in this process ask nobody else, with this login or none.

        Args:
            monkeypatch: pytest's.
            folder: an empty one, for what the library keeps.
            token: of the login.
        """
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        read_when_imported = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(folder / "none"),
            "HF_HUB_CACHE": str(folder / "cache"),
        }
        for name, value in read_when_imported.items():
            monkeypatch.setattr(constants, name, value)

    def paths(self, method: str) -> list[str]:
        """The paths asked for with a method, in order."""
        return [path for asked, path in self.asked if asked == method]

    def answer(self, method: str, path: str, body: bytes, login: str) -> tuple[int, dict | list | bytes]:
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
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if path.startswith("/api/jobs/"):
            return self._job(path.split("/")[3:], said)
        if "/resolve/" in path:
            return self._file(path)
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

    def _job(self, rest: list[str], said: dict) -> tuple[int, dict | list | bytes]:
        if rest == ["hardware"]:
            return 200, HARDWARE
        if len(rest) == 1:  # a new one, which is over at once
            self.jobs.append(said)
            return 200, self._about_job({"stage": "SCHEDULING"})
        if rest[2:] == ["logs"]:
            self.done()
            events = (json.dumps({"timestamp": "2026-11-22T12:00:00.000Z", "data": line}) for line in self.log)
            return 200, "".join(f"data: {event}\n\n" for event in events).encode()
        return 200, self._about_job(self.end)

    def _about_job(self, status: dict) -> dict:
        owner = {"id": "1", "name": "me", "type": "user"}
        return {"id": "6a", "status": {**status, "message": status.get("message")}, "owner": owner}

    def _file(self, path: str) -> tuple[int, bytes]:
        _, owner, name, _, _, *rest = path.split("/")
        return 200, self.repos[f"{owner}/{name}"].files["/".join(rest)]

    def _upload(self, wanted: dict) -> dict:
        if wanted["oid"] in self.objects:
            return wanted  # nothing to do
        return wanted | {"actions": {"upload": {"href": f"{self.url}/store/{wanted['oid']}"}}}

    def _about(self, repo_id: str, repo: Repo, rest: list[str], said: dict, body: bytes) -> tuple[int, dict | list]:
        head = repo.commits[-1] if repo.commits else "0" * 40
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": name} for name in repo.files]
            return 200, {"id": repo_id, "sha": head, "private": repo.private, "siblings": siblings}
        if rest[0] == "tree":
            found = [{"type": "file", "path": n, "size": len(c), "oid": _hash(c)} for n, c in repo.files.items()]
            return 200, found
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


HARDWARE = [
    {
        "name": name,
        "prettyName": name,
        "cpu": "4 vCPU",
        "ram": "15 GB",
        "ephemeralStorage": "50 GB",
        "accelerator": {"type": "gpu", "model": model, "quantity": "1", "vram": vram, "manufacturer": "Nvidia"},
        "unitCostMicroUSD": round(hour / 60 * 1e6),
        "unitCostUSD": hour / 60,
        "unitLabel": "minute",
    }
    for name, model, vram, hour in (("t4-small", "T4", "16 GB", 0.5), ("l4x1", "L4", "24 GB", 0.8))
]
"""What can be rented of the stand-in: a T4 at another price than the list kept in the package, and an L4."""


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


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
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{_hash(content)}"')
            self.send_header("X-Repo-Commit", self.path.split("/")[4] if "/resolve/" in self.path else "")
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            if isinstance(answer, dict) and "error" in answer:
                self.send_header("X-Error-Message", answer["error"])
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = do

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
