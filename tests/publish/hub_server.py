"""A small server on this machine that speaks the Hub's protocol as huggingface_hub 2.4 uses it over Git LFS.

    with HubServer() as hub:
        hub.users["hf_a"] = user("me")
        hub.fail("PUT", "/lfs/", status=503, times=2)
        ...                                     # HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET=1

It knows whoami-v2, repos/create, info, tree, validate-yaml, preupload, the LFS batch with uploads in one piece and in
parts, commit (NDJSON), and resolve with the headers that a download looks at. `requests` are all that came in.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

LARGE = (".safetensors", ".png", ".model", ".npy", ".tokens")
PART_SIZE = 20_000
"""Bytes: larger files are uploaded in parts."""


def user(name: str, role: str = "write", writes_to: tuple[str, ...] = (), **organisations: str) -> dict:
    """What whoami-v2 says: `role` is read, write or fineGrained (with `writes_to`); organisations by their role."""
    access: dict = {"displayName": "test", "role": role}
    if role == "fineGrained":
        scoped = [{"entity": {"type": "user", "name": each}, "permissions": ["repo.write"]} for each in writes_to]
        access["fineGrained"] = {"global": [], "scoped": scoped}
    return {
        "type": "user",
        "name": name,
        "orgs": [{"type": "org", "name": each, "roleInOrg": role} for each, role in organisations.items()],
        "auth": {"type": "access_token", "accessToken": access},
    }


@dataclass
class Repository:
    """`files` by name; `commits` are messages, the last one last; `sha` changes with each."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["initial commit"])

    @property
    def sha(self) -> str:
        return hashlib.sha1("\n".join(self.commits).encode()).hexdigest()


@dataclass
class Fault:
    """What happens to the next `times` requests: an answer with `status`, or a connection that breaks.

    `cut` is `during` (half of the body was read) or `after` (the request was carried out, and is not answered).
    """

    method: str
    path: str
    status: int
    cut: str
    headers: dict[str, str]
    message: str
    times: int


class HubServer(ThreadingHTTPServer):
    """Listens on a free port of this machine while the `with` block runs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.users: dict[str, dict] = {}
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: connections are broken on purpose."""

    def fail(
        self,
        method: str,
        path: str,
        *,
        status: int = 500,
        cut: str = "",
        times: int = 1,
        message: str = "no",
        **headers,
    ) -> None:
        """The next `times` requests of this method whose path matches the pattern `path` fail."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(method, path, status, cut, named, message, times))

    def asked(self, method: str, path: str) -> int:
        """How many such requests came in."""
        return sum(each == method and re.search(path, where) is not None for each, where in self.requests)


class _Answer(Exception):  # noqa: N818
    """Ends the handling of a request."""

    def __init__(self, status: int, body: object = b"", **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *words: object) -> None:
        """Nothing on the terminal."""

    def _respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server
        with hub.lock:
            hub.requests.append((self.command, path))
            fault = next((each for each in hub.faults if each.times and self._meets(each, path)), None)
            if fault is not None:
                fault.times -= 1
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.cut == "during":
            self.rfile.read(length // 2)
            return self._break_off()
        body = self._body(length)
        try:
            if fault is not None and not fault.cut:
                raise _Answer(fault.status, {"error": fault.message}, **fault.headers)
            with hub.lock:
                self._route(path, body)
        except _Answer as answer:
            if fault is not None and fault.cut == "after":
                return self._break_off()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    do_GET = do_HEAD = do_POST = do_PUT = _respond  # noqa: N815

    def _meets(self, fault: Fault, path: str) -> bool:
        return fault.method == self.command and re.search(fault.path, path) is not None

    def _body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _break_off(self) -> None:
        """Resets the connection, as a network that fails does."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    # What each address does. Every way ends in an `_Answer`.

    def _route(self, path: str, body: bytes) -> None:
        for pattern, handle in _ROUTES:
            if match := re.fullmatch(pattern, path):
                handle(self, body, **match.groupdict())
        raise _Answer(404, {"error": f"no such address: {self.command} {path}"})

    def _who(self) -> dict:
        who = self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if who is None:
            said = "Invalid credentials in Authorization header"
            raise _Answer(401, {"error": said}, X_Error_Message=said)
        return who

    def _may_write(self, repo_id: str) -> None:
        who = self._who()
        owners = [who["name"], *(each["name"] for each in who["orgs"] if each["roleInOrg"] != "read")]
        if who["auth"]["accessToken"]["role"] == "read" or repo_id.partition("/")[0] not in owners:
            raise _Answer(403, {"error": "You don't have the rights"}, X_Error_Message="You don't have the rights")

    def _repository(self, repo_id: str, kind: str) -> Repository:
        """Of a private one, only its owner learns that it is there."""
        repository = self.server.repositories.get((kind, repo_id))
        if repository is not None and repository.private:
            who = self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "), {})
            owners = [who.get("name"), *(each["name"] for each in who.get("orgs", []))]
            repository = repository if repo_id.partition("/")[0] in owners else None
        if repository is None:
            signed_in = "Authorization" in self.headers
            raise _Answer(404 if signed_in else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return repository

    def _whoami(self, body: bytes) -> None:
        raise _Answer(200, self._who())

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or self._who()['name']}/{asked['name']}"
        self._may_write(repo_id)
        key = (asked.get("type", "model"), repo_id)
        if key in self.server.repositories:
            raise _Answer(409, {"error": "You already created this repo", "url": f"{self.server.url}/{repo_id}"})
        private = asked.get("visibility", "public") == "private"
        self.server.repositories[key] = Repository(private, {".gitattributes": b"*.safetensors filter=lfs\n"})
        raise _Answer(200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def _info(self, body: bytes, kind: str, repo_id: str) -> None:
        repository = self._repository(repo_id, kind)
        siblings = [{"rfilename": name} for name in sorted(repository.files)]
        said = {"id": repo_id, "private": repository.private, "sha": repository.sha, "siblings": siblings, "tags": []}
        raise _Answer(200, said)

    def _tree(self, body: bytes, kind: str, repo_id: str, folder: str | None = None) -> None:
        inside = f"{folder}/" if folder else ""
        files = {name: data for name, data in self._repository(repo_id, kind).files.items() if name.startswith(inside)}
        if folder and not files:
            raise _Answer(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
        raise _Answer(200, [_entry(name, data) for name, data in sorted(files.items())])

    def _validate(self, body: bytes) -> None:
        """The Hub's rules that a card of ours could break, in words of their own."""
        text = json.loads(body)["content"]
        head = text.split("---\n")[1] if text.startswith("---\n") else "{}"
        errors = []
        metadata = yaml.safe_load(head) or {}
        license = metadata.get("license")
        if license is not None and not re.fullmatch(r"(apache|mit|cc|gpl|other|unknown)[\w.-]*", str(license)):
            errors.append({"message": f'"license" must be one of [...], not {license}'})
        if not all(isinstance(tag, str) for tag in metadata.get("tags", [])):
            errors.append({"message": '"tags" must be strings'})
        for name in [metadata.get("base_model") or "a/b", *(metadata.get("datasets") or [])]:
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
                errors.append({"message": f"{name} is no valid id"})
        raise _Answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def _preupload(self, body: bytes, kind: str, repo_id: str) -> None:
        self._may_write(repo_id)
        held = self._repository(repo_id, kind).files
        said = [
            {
                "path": (name := each["path"]),
                "uploadMode": "lfs" if name.endswith(LARGE) else "regular",
                "shouldIgnore": False,
                **({"oid": _oid(name, held[name])} if name in held else {}),
            }
            for each in json.loads(body)["files"]
        ]
        raise _Answer(200, {"files": said})

    def _batch(self, body: bytes, repo_id: str) -> None:
        self._may_write(repo_id)
        raise _Answer(200, {"objects": [self._object(each) for each in json.loads(body)["objects"]]})

    def _object(self, asked: dict) -> dict:
        if asked["oid"] in self.server.objects:
            return asked
        address = f"{self.server.url}/lfs/{asked['oid']}"
        upload: dict = {"href": address}
        if asked["size"] > PART_SIZE:
            parts = range(1, -(-asked["size"] // PART_SIZE) + 1)
            upload["header"] = {"chunk_size": str(PART_SIZE), **{f"{n:05d}": f"{address}/part/{n}" for n in parts}}
        return {**asked, "actions": {"upload": upload, "verify": {"href": f"{self.server.url}/lfs/verify"}}}

    def _upload(self, body: bytes, oid: str) -> None:
        if self.command == "POST":  # the end of an upload in parts
            numbers = [part["partNumber"] for part in json.loads(body)["parts"]]
            body = b"".join(self.server.parts[oid, number] for number in numbers)
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Answer(422, {"error": "the bytes are not those of the hash"})
        self.server.objects[oid] = body
        raise _Answer(200, {"success": True})

    def _part(self, body: bytes, oid: str, number: str) -> None:
        self.server.parts[oid, int(number)] = body
        raise _Answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')

    def _verify(self, body: bytes) -> None:
        self._who()
        asked = json.loads(body)
        is_there = len(self.server.objects.get(asked["oid"], b"")) == asked["size"]
        raise _Answer(200 if is_there else 404, {"success": is_there})

    def _commit(self, body: bytes, kind: str, repo_id: str) -> None:
        self._may_write(repo_id)
        repository, files = self._repository(repo_id, kind), {}
        header, *operations = map(json.loads, body.splitlines())
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif files.pop(value["path"], None) is None:
                raise _Answer(404, {"error": "A file with this name doesn't exist"}, X_Error_Code="EntryNotFound")
        repository.files = files
        repository.commits.append(header["value"]["summary"])
        where = f"{self.server.url}/{repo_id}/commit/{repository.sha}"
        raise _Answer(200, {"success": True, "commitOid": repository.sha, "commitUrl": where})

    def _resolve(self, body: bytes, repo_id: str, name: str, kind: str | None) -> None:
        repository = self._repository(repo_id, "dataset" if kind else "model")
        if name not in repository.files:
            raise _Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        data = repository.files[name]
        headers = {"X_Repo_Commit": repository.sha, "ETag": f'"{_oid(name, data)}"', "Content_Length": str(len(data))}
        if name.endswith(LARGE):
            headers |= {"X_Linked_Etag": headers["ETag"], "X_Linked_Size": str(len(data))}
        raise _Answer(200, data, **headers)


def _oid(name: str, data: bytes) -> str:
    """Of a large file its sha256, of others git's hash, as the Hub and its client compare them."""
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(data), "oid": _oid(name, data)}


_REPO = r"(?P<repo_id>[\w.-]+/[\w.-]+)"
_API = rf"/api/(?P<kind>model|dataset)s/{_REPO}"
_ROUTES = [
    (r"/api/whoami-v2", _Handler._whoami),
    (r"/api/repos/create", _Handler._create),
    (r"/api/validate-yaml", _Handler._validate),
    (rf"{_API}(/revision/\w+)?", _Handler._info),
    (rf"{_API}/tree/\w+(/(?P<folder>.+))?", _Handler._tree),
    (rf"{_API}/preupload/main", _Handler._preupload),
    (rf"{_API}/commit/main", _Handler._commit),
    (rf"/(datasets/)?{_REPO}\.git/info/lfs/objects/batch", _Handler._batch),
    (r"/lfs/verify", _Handler._verify),
    (r"/lfs/(?P<oid>\w+)", _Handler._upload),
    (r"/lfs/(?P<oid>\w+)/part/(?P<number>\d+)", _Handler._part),
    (rf"/(?P<kind>datasets/)?{_REPO}/resolve/\w+/(?P<name>.+)", _Handler._resolve),
]
