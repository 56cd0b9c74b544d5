"""A small Hugging Face Hub on the loopback interface: what the real client asks of it in the tests, and no more.

It listens twice: as the Hub, and as the storage that the Hub's signed addresses point to, which is another origin.
"""

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import re
import secrets
import shutil
import socket
import socketserver
import struct
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlencode

TOKEN = "hf_secretToken0123456789abcdefghijk"  # noqa: S105
USER = "someone"
CHUNK = 1 << 20
LARGE = 10_000_000
LFS_SUFFIXES = (".safetensors", ".png", ".bin", ".pt", ".pth", ".onnx", ".ckpt", ".npz", ".zip", ".gz")
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


def as_lfs(path, size):
    return path.endswith(LFS_SUFFIXES) or size > LARGE


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def pointer(sha256, size):
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


# What is kept


@dataclass(frozen=True)
class Entry:
    """A file of a commit: with its bytes if it is a regular one, with its digest if it is in the large-file storage."""

    size: int
    blob_id: str
    data: bytes | None = None
    sha256: str | None = None

    @property
    def oid(self):
        return self.sha256 or self.blob_id

    def lfs(self, digest):
        """Say what is known of a large file; the name of its digest differs from one endpoint to another."""
        return {digest: self.sha256, "size": self.size, "pointerSize": len(pointer(self.sha256, self.size))}


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    description: str
    parent: str | None
    author: str
    date: str
    files: dict[str, Entry]

    def brief(self):
        return {"id": self.oid, "title": self.title, "date": self.date}


@dataclass
class Repo:
    id: str
    private: bool = False
    gated: str | bool = False  # False, "auto" or "manual"
    readers: set[str] = field(default_factory=set)  # who was let in, if it is gated
    branches: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)  # the large files that were uploaded, committed or not

    @property
    def owner(self):
        return self.id.split("/")[0]

    def refs(self, rev):
        """Return the table that holds a branch or a pull request, or None."""
        return next((table for table in (self.branches, self.pulls) if rev in table), None)

    def commit(self, rev):
        table = self.refs(rev)
        if table is not None:
            return self.commits[table[rev]]
        if re.fullmatch("[0-9a-f]{7,40}", rev):
            for oid, commit in self.commits.items():
                if oid.startswith(rev):
                    return commit
        raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")


@dataclass
class Request:
    """A request as it came, with what became of it."""

    origin: str  # "hub" or "storage"
    method: str
    path: str  # with its query, quoted as it came
    headers: dict[str, str]  # the names in lower case
    status: int | None = None  # None: no answer was given
    received: int = 0
    sent: int = 0
    body: bytes | None = None  # None for an upload to the storage

    def __str__(self):
        return f"{self.method} {unquote(self.path)}"


@dataclass
class Fault:
    kind: str
    pattern: re.Pattern
    times: int | None  # None: always
    method: str | None = None
    seen: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: int = 0
    abruptly: bool = False
    seconds: float = 0.0
    at: int = -1

    def hits(self, kind, line):
        if self.kind != kind or self.times == 0 or self.method not in (None, line.split(" ")[0]):
            return False
        return self.pattern.search(line) is not None


# Answers


@dataclass(frozen=True)
class Content:
    """A stretch of bytes in memory or of a file."""

    source: bytes | Path
    start: int
    stop: int

    @classmethod
    def whole(cls, source):
        return cls(source, 0, len(source) if isinstance(source, bytes) else source.stat().st_size)

    def chunks(self):
        if isinstance(self.source, bytes):
            yield self.start, self.source[self.start : self.stop]
            return
        with self.source.open("rb") as file:
            file.seek(self.start)
            for position in range(self.start, self.stop, CHUNK):
                yield position, file.read(min(CHUNK, self.stop - position))


@dataclass
class Reply:
    content: Content
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = False


def reply(body, status=200, **headers):
    """Answer with JSON, or with bytes as they are."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if not isinstance(body, bytes):
        body = json.dumps(body, default=str).encode()
        named = {"Content-Type": "application/json; charset=utf-8"} | named
    return Reply(Content.whole(body), status, named)


class HubError(Exception):
    """An answer in the words of the Hub."""

    def __init__(self, status, message, code=None, **headers):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers

    def reply(self):
        named = {"X-Error-Message": self.message} | ({"X-Error-Code": self.code} if self.code else {})
        answer = reply({"error": self.message}, self.status, **self.headers)
        answer.headers |= named
        return answer


class StorageError(HubError):
    """An answer in the words of S3."""

    def reply(self):
        body = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>".encode()
        return reply(body, self.status, Content_Type="application/xml", **self.headers)


class Cut(Exception):  # noqa: N818
    """The connection is to be closed without a word."""


def requested_range(header, size):
    """Return the first byte and the one past the last that a Range header asks for; None if it counts for nothing."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= size:
        said = "The requested range is not satisfiable"
        raise StorageError(416, said, "InvalidRange", Content_Range=f"bytes */{size}")
    return start, stop


def in_range(answer, headers):
    if not answer.ranges:
        return answer
    answer.headers["Accept-Ranges"] = "bytes"
    size = answer.content.stop
    asked = requested_range(headers["range"], size) if "range" in headers else None
    if asked is None:
        return answer
    start, stop = asked
    content = Content(answer.content.source, start, stop)
    return Reply(content, 206, answer.headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"})


# The server as the tests see it


class HubServer:
    """The Hub. Every pattern is a regular expression that is looked for in "METHOD path?query", unquoted."""

    def __init__(self):
        self.tokens: dict[str, str] = {}
        self.read_only: set[str] = set()  # tokens that may not write
        self.organizations: dict[str, set[str]] = {}
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.errors: list[str] = []  # mistakes of this server
        self.chunk_size: int | None = None  # larger files are uploaded in parts of that many bytes
        self.page_size = 1000  # entries of a tree in one answer
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self.uploads: dict[str, tuple[str, str]] = {}  # upload in parts -> repository, digest
        self.faults: list[Fault] = []
        self.secret = secrets.token_bytes(16)
        self.numbers = itertools.count(1)

    def start(self):
        self.folder = Path(tempfile.mkdtemp(prefix="hub-"))
        self.listeners = {name: Listener(self, name) for name in ("hub", "storage")}
        self.threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in self.listeners.values()]
        for thread in self.threads:
            thread.start()

    def stop(self):
        """End at once, whatever goes on; a second time does nothing."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        for listener in self.listeners.values():
            listener.shutdown()
        for listener in self.listeners.values():
            listener.close_all()
        for thread in self.threads:
            thread.join()
        shutil.rmtree(self.folder)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def url(self):
        return self.listeners["hub"].url

    @property
    def storage_url(self):
        return self.listeners["storage"].url

    # The world

    def add_user(self, name, token, organizations=(), read_only=False):
        self.tokens[token] = name
        self.organizations.setdefault(name, set()).update(organizations)
        if read_only:
            self.read_only.add(token)

    def create(self, repo_id, private=False, gated=False):
        repo = Repo(repo_id, private, "manual" if gated is True else gated)
        with self.lock:
            self.repos[repo_id] = repo
            files = {".gitattributes": self.regular(GITATTRIBUTES)}
            self.add_commit(repo, "main", files, "initial commit", author=repo.owner)
        return repo

    def put(self, repo_id, files, message="Upload files", rev="main", description=""):
        """Commit files: bytes, the path of a file, or None for one that is to go."""
        repo = self.repos[repo_id]
        entries = {path: self.store(repo, path, source) for path, source in files.items() if source is not None}
        with self.lock:
            kept = {path: entry for path, entry in self.files(repo_id, rev).items() if path not in files}
            return self.add_commit(repo, rev, kept | entries, message, description, repo.owner)

    def files(self, repo_id, rev="main"):
        return dict(self.repos[repo_id].commit(rev).files)

    def read(self, repo_id, path, rev="main"):
        entry = self.files(repo_id, rev)[path]
        return self.object_path(entry.sha256).read_bytes() if entry.sha256 else entry.data

    def commits(self, repo_id, rev="main"):
        """Return the commits, the newest first."""
        repo, found = self.repos[repo_id], []
        oid = repo.commit(rev).oid
        while oid is not None:
            found.append(repo.commits[oid])
            oid = found[-1].parent
        return found

    # What is seen, and what goes wrong

    def clear(self):
        """Forget the requests and the faults."""
        with self.lock:
            self.requests.clear()
            self.faults.clear()

    def asked(self, pattern):
        """Return the requests that match."""
        return [request for request in list(self.requests) if re.search(pattern, str(request))]

    def fail(self, pattern, status=500, headers=None, body=None, times=1, method=None):
        """Answer with an error instead of doing what was asked."""
        if body is None:
            body = json.dumps({"error": HTTPStatus(status).phrase}).encode()
        elif isinstance(body, str):
            body = body.encode()
        return self._fault("fail", pattern, times, method, status=status, headers=headers or {}, body=body)

    def cut(self, pattern, after, times=1, method=None, abruptly=False):
        """Close the connection after so many bytes: of what is sent, or of what is received with a POST or a PUT.

        A download ends as an orderly close would end it, or abruptly with a reset.
        """
        return self._fault("cut", pattern, times, method, after=after, abruptly=abruptly)

    def lose(self, pattern, times=1, method=None):
        """Do what was asked, then close the connection instead of answering."""
        return self._fault("lose", pattern, times, method)

    def delay(self, pattern, seconds, times=1, method=None):
        """Wait before anything of the request's body is read."""
        return self._fault("delay", pattern, times, method, seconds=seconds)

    def corrupt(self, pattern, at=-1, times=None):
        """Serve a file with one byte changed; the address of a large file names it too, as ?filename=..."""
        return self._fault("corrupt", pattern, times, "GET", at=at)

    def _fault(self, kind, pattern, times, method, **details):
        fault = Fault(kind, re.compile(pattern), times, method, **details)
        with self.lock:
            self.faults.append(fault)
        return fault

    def take(self, kind, line):
        """Return the fault that is to happen now, if one is."""
        with self.lock:
            for fault in self.faults:
                if fault.hits(kind, line):
                    fault.seen += 1
                    fault.times = None if fault.times is None else fault.times - 1
                    return fault
        return None

    # The storage

    def object_path(self, sha256):
        return self.folder / sha256

    def regular(self, data):
        return Entry(len(data), git_sha1(data), data=data)

    def large(self, sha256):
        size = self.object_path(sha256).stat().st_size
        return Entry(size, git_sha1(pointer(sha256, size)), sha256=sha256)

    def store(self, repo, path, source):
        content = Content.whole(source if isinstance(source, bytes) else Path(source))
        pieces = (piece for _, piece in content.chunks())
        if not as_lfs(path, content.stop):
            return self.regular(b"".join(pieces))
        return self.large(self.keep(repo, self.receive(pieces)))

    def receive(self, pieces):
        """Write what comes to a file; return its path and its digest."""
        digest, path = hashlib.sha256(), self.folder / f"incoming-{next(self.numbers)}"
        with path.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        return path, digest.hexdigest()

    def keep(self, repo, received):
        path, sha256 = received
        with self.lock:
            path.replace(self.object_path(sha256))
            repo.objects.add(sha256)
        return sha256

    def add_commit(self, repo, ref, files, title, description="", author=USER, parent=None):
        table = repo.pulls if ref.startswith("refs/pr/") else repo.branches
        parent = parent or table.get(ref)
        tree = {path: entry.blob_id for path, entry in sorted(files.items())}
        told = json.dumps([repo.id, parent, title, description, tree, next(self.numbers)]).encode()
        oid = hashlib.sha1(told, usedforsecurity=False).hexdigest()
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        repo.commits[oid] = Commit(oid, title, description, parent, author, date, dict(sorted(files.items())))
        table[ref] = oid
        return repo.commits[oid]

    def signed(self, base, path, **query):
        target = f"{quote(path)}?{urlencode(query | {'X-Expires': 3600}, safe='/', quote_via=quote)}"
        return f"{base}{target}&X-Signature={self.signature(target)}"

    def signature(self, target):
        return hmac.new(self.secret, target.encode(), "sha256").hexdigest()

    def answer(self, call):
        for origin, method, pattern, function in ROUTES:
            match = pattern.fullmatch(call.path)
            if match and origin == call.origin and method == call.method.replace("HEAD", "GET"):
                named = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                if origin == "storage":
                    call.check_signature()
                with self.lock:
                    return function(call, **named)
        raise HubError(404, "Sorry, we can't find the page you are looking for.")


# What is asked for


@dataclass
class Call:
    hub: HubServer
    origin: str
    method: str
    target: str
    headers: dict[str, str]
    body: bytes | tuple[Path, str]  # or where a file lies that was uploaded, and its digest

    @property
    def path(self):
        return self.target.partition("?")[0]

    @cached_property
    def query(self):
        return parse_qs(self.target.partition("?")[2])

    def asks(self, name):
        return self.query.get(name, [""])[0].lower() in ("1", "true")

    @cached_property
    def json(self):
        return json.loads(self.body)

    @cached_property
    def token(self):
        authorization = self.headers.get("authorization")
        if authorization is None:
            return None
        token = authorization.removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return token

    @property
    def user(self):
        return self.hub.tokens.get(self.token)

    def belongs(self, namespace):
        return self.user == namespace or namespace in self.hub.organizations.get(self.user, ())

    def require_user(self):
        if self.user is None:
            raise HubError(401, "Invalid username or password.")

    def require_write(self, namespace):
        self.require_user()
        if self.token in self.hub.read_only or not self.belongs(namespace):
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")

    def repo(self, repo_id, write=False):
        """Return the repository, if who asks may read it, or write to it."""
        user, repo = self.user, self.hub.repos.get(repo_id)
        hidden = repo is None or (repo.private and not self.belongs(repo.owner))
        if user is None and (hidden or write):
            # The Hub gives no code here: its client knows by the https of the address, which is http with us.
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if hidden:
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write:
            self.require_write(repo.owner)
        return repo

    def repo_with_files(self, repo_id):
        """Return the repository, if who asks may read its files."""
        repo = self.repo(repo_id)
        if repo.gated and not self.belongs(repo.owner) and self.user not in repo.readers:
            said = f"Access to model {repo_id} is restricted"
            if self.user is None:
                said += ". You must have access to it and be authenticated to access it. Please log in."
                raise HubError(401, said, "GatedRepo")
            said += f" and you are not in the authorized list. Visit {self.hub.url}/{repo_id} to ask for access."
            raise HubError(403, said, "GatedRepo")
        return repo

    def check_signature(self):
        if "authorization" in self.headers:
            said = "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter should be specified"
            raise StorageError(400, said, "InvalidArgument")
        target, _, signature = self.target.rpartition("&X-Signature=")
        if not hmac.compare_digest(signature, self.hub.signature(target)):
            raise StorageError(403, "The request signature does not match", "SignatureDoesNotMatch")


ROUTES = []


def route(method, pattern, origin="hub"):
    for name, what in {"REPO": "[^/]+/[^/]+", "REV": "[^/]+", "PATH": ".+", "OID": "[0-9a-f]{64}"}.items():
        pattern = pattern.replace(name, f"(?P<{name.lower()}>{what})")

    def keep(function):
        ROUTES.append((origin, method, re.compile(pattern), function))
        return function

    return keep


@route("GET", "/api/whoami-v2")
def whoami(call):
    call.require_user()
    role = "read" if call.token in call.hub.read_only else "write"
    return reply(
        {
            "type": "user",
            "id": git_sha1(call.user.encode())[:24],
            "name": call.user,
            "fullname": call.user,
            "orgs": [{"type": "org", "name": name} for name in sorted(call.hub.organizations[call.user])],
            "auth": {"type": "access_token", "accessToken": {"displayName": "tests", "role": role}},
        }
    )


@route("POST", "/api/repos/create")
def create_repo(call):
    call.require_user()
    asked = call.json
    owner = asked.get("organization") or call.user
    repo_id = f"{owner}/{asked['name']}"
    call.require_write(owner)
    told = {"url": f"{call.hub.url}/{repo_id}", "name": repo_id}
    if asked.get("type", "model") != "model":
        raise HubError(400, "Only models are kept here")
    if repo_id in call.hub.repos:
        return reply({"error": "You already created this model repo", **told}, 409)
    call.hub.create(repo_id, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return reply(told)


@route("GET", "/api/models/REPO(/revision/REV)?")
def model_info(call, repo, rev="main"):
    repo = call.repo(repo)
    commit = repo.commit(rev)
    readme = call.hub.read(repo.id, "README.md", commit.oid) if "README.md" in commit.files else b""
    card = front_matter(readme)[0]
    index = card.pop("model-index", None)
    told = {
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.owner,
        "sha": commit.oid,
        "lastModified": commit.date,
        "createdAt": next(iter(repo.commits.values())).date,
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": tags(card),
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
        "cardData": card or None,
        "model-index": index,
        "siblings": [sibling(path, entry, call.asks("blobs")) for path, entry in commit.files.items()],
    }
    if "expand" in call.query:
        told = {name: told.get(name) for name in ("id", *call.query["expand"])}
    return reply({name: value for name, value in told.items() if value is not None})


def sibling(path, entry, blobs):
    told = {"rfilename": path}
    if blobs:
        told |= {"size": entry.size, "blobId": entry.blob_id}
        told |= {"lfs": entry.lfs("sha256")} if entry.sha256 else {}
    return told


def front_matter(readme):
    """Return the metadata of a model card, {} if it has none, and what is wrong with it."""
    import yaml  # huggingface_hub brings it

    match = re.match(r"---\s*\n(.*?)\n?---\s*(\n|$)", readme.decode().replace("\r\n", "\n"), re.DOTALL)
    try:
        card = (yaml.safe_load(match[1]) or {}) if match else {}
    except yaml.YAMLError as error:
        return {}, [str(error)]
    return (card, card_problems(card)) if isinstance(card, dict) else ({}, ["The metadata must be a mapping"])


def tags(card):
    found = list(card.get("tags") or [])
    found += [card[name] for name in ("library_name",) if name in card]
    found += [f"license:{card['license']}"] if isinstance(card.get("license"), str) else []
    return found


@route("POST", "/api/validate-yaml")
def validate_yaml(call):
    card, problems = front_matter(call.json["content"].encode())
    empty = [] if card or problems else [{"message": "empty or missing yaml metadata in repo card"}]
    return reply({"errors": [{"message": text} for text in problems], "warnings": empty}, 400 if problems else 200)


def card_problems(card):
    wants = {"license": str, "library_name": str, "pipeline_tag": str, "tags": list, "model-index": list}
    found = [
        f'"{name}" must be {"a string" if kind is str else "an array"}'
        for name, kind in wants.items()
        if name in card and not isinstance(card[name], kind)
    ]
    if found:
        return found
    for number, model in enumerate(card.get("model-index", [])):
        where = f"model-index[{number}]"
        found += missing(model, where, "name", "results")
        for count, result in enumerate(model.get("results", [])):
            found += result_problems(result, f"{where}.results[{count}]")
    return found


def result_problems(result, where):
    found = missing(result, where, "task", "metrics")
    found += missing(result.get("task", {"type": ""}), f"{where}.task", "type")
    if "dataset" in result:
        found += missing(result["dataset"], f"{where}.dataset", "type", "name")
    for number, metric in enumerate(result.get("metrics", [])):
        found += missing(metric, f"{where}.metrics[{number}]", "type", "value")
    return found


def missing(mapping, where, *names):
    return [f'"{where}.{name}" is required' for name in names if name not in mapping]


@route("GET", "/api/models/REPO/refs")
def refs(call, repo):
    repo = call.repo(repo)

    def listed(table, prefix=""):
        return [{"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in table.items()]

    told = {"branches": listed(repo.branches, "refs/heads/"), "converts": [], "tags": []}
    if call.asks("include_prs"):
        told["pullRequests"] = listed(repo.pulls)
    return reply(told)


@route("GET", "/api/models/REPO/commits/REV")
def commits(call, repo, rev):
    repo = call.repo(repo)
    return reply(
        [
            commit.brief() | {"message": commit.description, "authors": [{"user": commit.author}]}
            for commit in call.hub.commits(repo.id, rev)
        ]
    )


@route("POST", "/api/models/REPO/branch/REV")
def branch(call, repo, rev):
    repo = call.repo(repo, write=True)
    if rev in repo.branches:
        raise HubError(409, f"Reference already exists: refs/heads/{rev}")
    repo.branches[rev] = repo.commit(call.json.get("startingPoint", "main")).oid
    return reply({})


@route("GET", "/api/models/REPO/tree/REV(/PATH)?")
def tree(call, repo, rev, path=""):
    commit = call.repo(repo).commit(rev)
    prefix = f"{path.strip('/')}/" if path.strip("/") else ""
    inside = {name for name in with_folders(commit.files) if name.startswith(prefix)}
    if prefix and not inside:
        raise HubError(404, f'{path} does not exist on "{rev}"', "EntryNotFound", X_Repo_Commit=commit.oid)
    if not call.asks("recursive"):
        inside = {name for name in inside if "/" not in name[len(prefix) :]}
    start = int(call.query.get("cursor", ["0"])[0])
    stop = start + call.hub.page_size
    answer = reply([listing(commit, name, call.asks("expand")) for name in sorted(inside)[start:stop]])
    if stop < len(inside):
        query = {name: values[0] for name, values in call.query.items()} | {"cursor": stop}
        answer.headers["Link"] = f'<{call.hub.url}{call.path}?{urlencode(query)}>; rel="next"'
    return answer


def with_folders(files):
    """Return the paths of files and of the folders that they are in."""
    return set(files) | {str(folder) for path in files for folder in PurePosixPath(path).parents[:-1]}


def listing(commit, path, expand):
    entry = commit.files.get(path)
    if entry is None:
        told = {"type": "directory", "oid": git_sha1(path.encode()), "size": 0, "path": path}
    else:
        told = {"type": "file", "oid": entry.blob_id, "size": entry.size, "path": path}
        told |= {"lfs": entry.lfs("oid")} if entry.sha256 else {}
    return told | ({"lastCommit": commit.brief()} if expand else {})


@route("POST", "/api/models/REPO/paths-info/REV")
def paths_info(call, repo, rev):
    commit = call.repo(repo).commit(rev)
    asked = parse_qs(call.body.decode())
    there = with_folders(commit.files)
    names = [name.strip("/") for name in asked.get("paths", [])]
    expand = asked.get("expand", [""])[0].lower() == "true"
    return reply([listing(commit, name, expand) for name in names if name in there])


@route("GET", "/REPO/resolve/REV/PATH")
def resolve(call, repo, rev, path):
    repo = call.repo_with_files(repo)
    commit = repo.commit(rev)
    entry = commit.files.get(path)
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
    named = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.oid}"'}
    if entry.sha256 is None:
        named |= {"Content-Type": "text/plain; charset=utf-8"}
        return Reply(Content.whole(entry.data), headers=named, ranges=True)
    named |= {"X-Linked-ETag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size), "Accept-Ranges": "bytes"}
    named["Location"] = call.hub.signed(call.hub.storage_url, f"/cdn/{repo.id}/{entry.sha256}", filename=path)
    return Reply(Content.whole(b"Found. Redirecting"), 302, named)


@route("GET", "/cdn/REPO/OID", origin="storage")
def cdn(call, repo, oid):
    if oid not in call.hub.repos[repo].objects:
        raise StorageError(404, "The specified key does not exist.", "NoSuchKey")
    headers = {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"}
    return Reply(Content.whole(call.hub.object_path(oid)), headers=headers, ranges=True)


# Writing


@route("POST", "/api/models/REPO/preupload/REV")
def preupload(call, repo, rev):
    repo = call.repo(repo, write=not call.asks("create_pr"))
    call.require_user()
    there = repo.commit(rev).files
    told = []
    for file in call.json["files"]:
        path = file["path"]
        mode = "lfs" if as_lfs(path, file["size"]) else "regular"
        oid = there[path].oid if path in there else None
        told.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return reply({"files": told})


@route("POST", r"/REPO\.git/info/lfs/objects/batch")
def lfs_batch(call, repo):
    asked = call.json
    if asked.get("operation") != "upload" or asked.get("hash_algo", "sha256") != "sha256":
        raise HubError(422, "Only uploads with sha256 are taken")
    repo = call.repo(repo, write="ref" in asked)  # who opens a pull request names no revision
    call.require_user()
    multipart = call.hub.chunk_size is not None and "multipart" in asked.get("transfers", ())
    objects = [lfs_actions(call.hub, repo, one["oid"], one["size"], multipart) for one in asked["objects"]]
    return reply({"transfer": "multipart" if multipart else "basic", "objects": objects})


def lfs_actions(hub, repo, oid, size, multipart):
    told = {"oid": oid, "size": size}
    if oid in repo.objects:
        return told
    to = f"/upload/{repo.id}/{oid}"
    if multipart and size > hub.chunk_size:
        upload = f"upload-{next(hub.numbers)}"
        hub.uploads[upload] = (repo.id, oid)
        header = {"chunk_size": str(hub.chunk_size)}
        for number in range(1, -(-size // hub.chunk_size) + 1):
            header[f"{number:05}"] = hub.signed(hub.storage_url, to, uploadId=upload, partNumber=number)
        action = {"href": hub.signed(hub.url, "/api/complete_multipart", uploadId=upload), "header": header}
    else:
        action = {"href": hub.signed(hub.storage_url, to), "header": {}}
    verify = {"href": f"{hub.url}/{repo.id}.git/info/lfs/objects/verify", "header": {}}
    return told | {"authenticated": True, "actions": {"upload": action, "verify": verify}}


@route("PUT", "/upload/REPO/OID", origin="storage")
def upload(call, repo, oid):
    path, sha256 = call.body
    if "uploadId" in call.query:
        path.replace(part_path(call.hub, call.query["uploadId"][0], int(call.query["partNumber"][0]), sha256))
    elif sha256 != oid:
        raise StorageError(400, "The provided digest does not match what was computed.", "BadDigest")
    else:
        call.hub.keep(call.hub.repos[repo], call.body)
    return reply(b"", ETag=f'"{sha256}"')


def part_path(hub, upload, number, sha256):
    return hub.folder / f"{upload}-{number}-{sha256}"


@route("POST", "/api/complete_multipart")
def complete_multipart(call):
    target, _, signature = call.target.rpartition("&X-Signature=")
    if not hmac.compare_digest(signature, call.hub.signature(target)):
        raise HubError(403, "The request signature does not match")
    upload = call.query["uploadId"][0]
    if upload not in call.hub.uploads:
        raise HubError(404, "No such upload")
    repo_id, oid = call.hub.uploads[upload]
    parts = [
        part_path(call.hub, upload, part["partNumber"], part["etag"].strip('"'))
        for part in sorted(call.json["parts"], key=lambda part: part["partNumber"])
    ]
    if not all(part.is_file() for part in parts):
        raise HubError(400, "One or more of the specified parts could not be found.")
    received = call.hub.receive(piece for part in parts for _, piece in Content.whole(part).chunks())
    if received[1] != oid or call.json["oid"] != oid:
        raise HubError(400, "The parts together are not the file that was announced")
    call.hub.keep(call.hub.repos[repo_id], received)
    for part in parts:
        part.unlink()
    del call.hub.uploads[upload]
    return reply({})


@route("POST", r"/REPO\.git/info/lfs/objects/verify")
def lfs_verify(call, repo):
    repo = call.repo(repo)
    call.require_user()
    oid, size = call.json["oid"], call.json["size"]
    if oid not in repo.objects or call.hub.large(oid).size != size:
        raise HubError(404, f"{oid} was not uploaded, or is not {size} bytes")
    return reply({})


@route("POST", "/api/models/REPO/commit/REV")
def commit(call, repo, rev):
    pull_request = call.asks("create_pr")
    repo = call.repo(repo, write=not pull_request)
    call.require_user()
    (_, header), *operations = ((line["key"], line["value"]) for line in map(json.loads, call.body.splitlines()))
    if repo.refs(rev) is None:
        raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
    base, wanted = repo.commit(rev), header.get("parentCommit")
    if wanted is not None and pull_request:
        base = repo.commit(wanted)
    elif wanted is not None and not base.oid.startswith(wanted):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")
    files = dict(base.files)
    for kind, value in operations:
        OPERATIONS[kind](call.hub, repo, files, value)
    ref = f"refs/pr/{len(repo.pulls) + 1}" if pull_request else rev
    made = call.hub.add_commit(
        repo, ref, files, header["summary"], header.get("description", ""), call.user, parent=base.oid
    )
    told = {"success": True, "commitOid": made.oid, "commitUrl": f"{call.hub.url}/{repo.id}/commit/{made.oid}"}
    if pull_request:
        told["pullRequestUrl"] = f"{call.hub.url}/{repo.id}/discussions/{len(repo.pulls)}"
    return reply(told)


def commit_file(hub, _, files, value):
    data = base64.b64decode(value["content"])
    if len(data) > LARGE:
        raise HubError(400, f"Your push was rejected because {value['path']} is larger than 10 MB: use LFS")
    files[value["path"]] = hub.regular(data)


def commit_lfs_file(hub, repo, files, value):
    if value["oid"] not in repo.objects:
        said = "Your push was rejected because an LFS pointer pointed to a file that does not exist."
        raise HubError(400, f"{said} Offending file: {value['path']}")
    files[value["path"]] = hub.large(value["oid"])


def commit_deleted_file(_, __, files, value):
    if files.pop(value["path"], None) is None:
        raise HubError(404, f"A file with this name doesn't exist: {value['path']}", "EntryNotFound")


def commit_deleted_folder(_, __, files, value):
    inside = [path for path in files if path.startswith(value["path"].rstrip("/") + "/")]
    if not inside:
        raise HubError(404, f"A folder with this name doesn't exist: {value['path']}", "EntryNotFound")
    for path in inside:
        del files[path]


OPERATIONS = {
    "file": commit_file,
    "lfsFile": commit_lfs_file,
    "deletedFile": commit_deleted_file,
    "deletedFolder": commit_deleted_folder,
}


# The wire


class Listener(ThreadingHTTPServer):
    daemon_threads = False  # so that closing waits for them
    request_queue_size = 64

    def __init__(self, hub, origin):
        self.hub, self.origin, self.open = hub, origin, set()
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)  # http.server would look up a name for the address

    def close_all(self):
        with self.hub.lock:
            for connection in self.open:
                hang_up(connection)
        self.server_close()

    def shutdown_request(self, request):
        self.close_request(request)  # an orderly end first would leave no connection to reset

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            self.hub.errors.append(traceback.format_exc())


def hang_up(connection):
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer in two packets waits 40 ms to be acknowledged
    wbufsize = 1 << 16

    def setup(self):
        super().setup()
        with self.server.hub.lock:
            self.server.open.add(self.connection)
            if self.server.hub.stopping.is_set():
                hang_up(self.connection)

    def finish(self):
        with self.server.hub.lock:
            self.server.open.discard(self.connection)
        super().finish()

    def log_message(self, *_):
        pass

    def handle_request(self):
        hub, headers = self.server.hub, {name.lower(): value for name, value in self.headers.items()}
        self.record = Request(self.server.origin, self.command, self.path, headers)
        self.line = str(self.record)
        hub.requests.append(self.record)
        if late := hub.take("delay", self.line):
            hub.stopping.wait(late.seconds)
        try:
            self.send(self.reply())
        except Cut:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def reply(self):
        hub, record = self.server.hub, self.record
        body = self.body()
        if fault := hub.take("fail", self.line):
            return Reply(Content.whole(fault.body), fault.status, {"Content-Type": "application/json"} | fault.headers)
        try:
            answer = hub.answer(Call(hub, record.origin, record.method, record.path, record.headers, body))
            answer = in_range(answer, record.headers)
        except HubError as error:
            answer = error.reply()
        if hub.take("lose", self.line):
            raise Cut
        return answer

    def body(self):
        if self.record.origin == "storage" and self.command == "PUT":
            return self.server.hub.receive(self.incoming())
        self.record.body = b"".join(self.incoming())
        return self.record.body

    def incoming(self):
        """Yield what the request brings."""
        uploads = self.command in ("POST", "PUT")
        cut = self.server.hub.take("cut", self.line) if uploads else None
        chunked = "chunked" in self.headers.get("transfer-encoding", "")
        pieces = self.chunked() if chunked else self.stretch(int(self.headers.get("content-length", 0)), cut)
        for piece in pieces:
            self.record.received += len(piece)
            yield piece
            if cut and self.record.received >= cut.after:
                raise Cut
        if cut:
            raise Cut

    def stretch(self, length, cut=None):
        left = min(length, cut.after) if cut else length
        while left:
            piece = self.rfile.read(min(left, CHUNK))
            if not piece:
                raise ConnectionError
            left -= len(piece)
            yield piece

    def chunked(self):
        while length := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            yield from self.stretch(length)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, answer):
        hub, content = self.server.hub, answer.content
        cut = hub.take("cut", self.line) if self.command == "GET" else None
        self.record.status = answer.status
        self.send_response(answer.status)
        length = content.stop - content.start
        for name, value in ({"Content-Length": str(length)} | answer.headers).items():
            self.send_header(name, value)
        self.send_header("X-Request-Id", f"Root=1-{next(hub.numbers)}")
        self.end_headers()
        if self.command != "HEAD":
            self.send_content(content, cut)

    def send_content(self, content, cut):
        spoiled = self.server.hub.take("corrupt", self.line) if self.record.status in (200, 206) else None
        for position, piece in content.chunks():
            data = spoil(content, spoiled.at, position, piece) if spoiled else piece
            if cut:
                data = data[: cut.after - self.record.sent]
            self.record.sent += len(data)  # counted before the client can have seen them
            self.wfile.write(data)
            if cut and self.record.sent == cut.after:
                break
        self.wfile.flush()
        if cut:
            if cut.abruptly:  # a reset that follows at once takes what was sent with it
                self.server.hub.stopping.wait(0.05)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise Cut


def spoil(content, at, position, piece):
    """Change one byte of a file, which counts from its end if it is negative."""
    size = len(content.source) if isinstance(content.source, bytes) else content.source.stat().st_size
    place = at % size - position
    if not 0 <= place < len(piece):
        return piece
    return piece[:place] + bytes([piece[place] ^ 0xFF]) + piece[place + 1 :]


# The client


def point_client_at(hub, home, monkeypatch):
    """Have huggingface_hub, in this process and in those that it starts, know no other Hub and no other folder."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _cache_manager, _http

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
        monkeypatch.setattr(constants, name, True)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, name, False)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    places = {
        "HF_HOME": home,
        "HF_HUB_CACHE": home / "hub",
        "HUGGINGFACE_HUB_CACHE": home / "hub",
        "HF_ASSETS_CACHE": home / "assets",
        "HF_XET_CACHE": home / "xet",
        "HF_TOKEN_PATH": home / "token",
        "HF_STORED_TOKENS_PATH": home / "stored_tokens",
        "AGENT_HARNESSES_PATH": home / "agents.json",
    }
    for name, path in places.items():
        monkeypatch.setattr(constants, name, str(path), raising=False)
    monkeypatch.setattr(_cache_manager, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    origins = _http._HUB_ORIGINS | {_http._url_origin(hub.url)}
    monkeypatch.setattr(_http, "_HUB_ORIGINS", origins)
    # create_repo and the like, without an HfApi of one's own, are methods of this one.
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)


UNSET = (
    "TRANSFORMERS_OFFLINE",
    "HF_TOKEN_PATH",
    "HF_ASSETS_CACHE",
    "HF_XET_CACHE",
    "HF_OIDC_RESOURCE",
    "HF_DEBUG",
    "HUGGINGFACE_HUB_CACHE",
    "HUGGINGFACE_CO_STAGING",
    "HUGGING_FACE_HUB_TOKEN",
)


def forget_clients():
    """Close the client's connections, and have it forget the file systems that it keeps by their endpoint."""
    from huggingface_hub import close_session

    close_session()
    module = sys.modules.get("huggingface_hub.hf_file_system")
    if module is not None:
        module.HfFileSystem.clear_instance_cache()
