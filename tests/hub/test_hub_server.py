"""The Hub of the tests, through the real client."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import torch
from hub_server import TOKEN, USER, HubServer
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    HfFileSystem,
    create_repo,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from safetensors.torch import save

MODEL = f"{USER}/digits"
OTHER = "hf_otherToken0123456789abcdefghijklm"
WEIGHTS = save({"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}, {"made": "here"})
CARD = b"---\nlicense: mit\ntags:\n- ewc\nlibrary_name: pytorch\n---\n# Digits\n"


@pytest.fixture
def api(hub):
    hub.create(MODEL)
    return HfApi()


@pytest.fixture
def stranger(hub):
    hub.add_user("other", OTHER)
    return HfApi(token=OTHER)


def add(**files):
    return [CommitOperationAdd(name.replace("__", "."), content) for name, content in files.items()]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# Repositories


def test_who_one_is(api, hub, stranger):
    hub.add_user("other", "hf_reads", organizations=["lab"], read_only=True)
    assert api.whoami()["name"] == USER
    assert api.whoami(token="hf_reads")["auth"]["accessToken"]["role"] == "read"
    assert [o["name"] for o in stranger.whoami()["orgs"]] == ["lab"]


def test_create_repo(hub):
    assert create_repo(MODEL, private=True).repo_id == MODEL
    assert hub.repos[MODEL].private
    assert create_repo(MODEL, exist_ok=True).repo_id == MODEL
    with pytest.raises(HfHubHTTPError, match="already created") as caught:
        create_repo(MODEL)
    assert caught.value.response.status_code == 409
    assert create_repo("digits-2").repo_id == f"{USER}/digits-2"
    assert not HfApi().model_info(f"{USER}/digits-2").private


def test_a_namespace_of_others(hub, stranger):
    hub.add_user("other", OTHER, organizations=["lab"])
    assert stranger.create_repo("lab/model").repo_id == "lab/model"
    with pytest.raises(HfHubHTTPError, match="write token") as caught:
        stranger.create_repo(MODEL)
    assert caught.value.response.status_code == 403


# Commits


def test_a_commit_with_regular_and_large_files(api, hub, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(WEIGHTS)
    info = api.create_commit(
        MODEL,
        [*add(README__md=CARD, config__json=b"{}", empty__bin=b""), CommitOperationAdd("model.safetensors", weights)],
        commit_message="First",
        commit_description="More of it",
    )
    commit = hub.commits(MODEL)[0]
    assert (info.oid, commit.title, commit.description) == (commit.oid, "First", "More of it")
    assert info.repo_url.repo_id == MODEL
    assert {name: entry.sha256 for name, entry in hub.files(MODEL).items() if name != ".gitattributes"} == {
        "README.md": None,
        "config.json": None,
        "empty.bin": None,
        "model.safetensors": sha256(WEIGHTS),
    }
    assert hub.read(MODEL, "model.safetensors") == WEIGHTS
    assert hub.read(MODEL, "README.md", info.oid) == CARD
    assert [c.title for c in api.list_repo_commits(MODEL)] == ["First", "initial commit"]
    assert [r.status for r in hub.asked("PUT .*/upload/|objects/verify")] == [200, 200]


def test_several_parts(api, hub):
    hub.chunk_size = 100
    api.create_commit(MODEL, add(model__safetensors=WEIGHTS, small__pt=b"x" * 100), commit_message="In parts")
    parts = hub.asked(r"PUT .*partNumber=\d")
    assert [request.received for request in parts] == [100] * (len(WEIGHTS) // 100) + [len(WEIGHTS) % 100]
    assert [request.received for request in hub.asked("PUT ") if request not in parts] == [100]
    assert hub.read(MODEL, "model.safetensors") == WEIGHTS
    assert not list(hub.folder.glob("upload-*"))


def test_what_is_there_is_neither_uploaded_nor_committed_again(api, hub):
    content = {"config__json": b"{}", "model__safetensors": WEIGHTS}
    first = api.create_commit(MODEL, add(**content), commit_message="First")
    hub.clear()
    again = api.create_commit(MODEL, add(**content), commit_message="Again")
    assert again.oid == first.oid
    assert not hub.asked("PUT |/commit/")
    api.create_commit(MODEL, add(copy__safetensors=WEIGHTS), commit_message="A copy")
    assert not hub.asked("PUT ")
    assert hub.read(MODEL, "copy.safetensors") == WEIGHTS
    assert len(hub.commits(MODEL)) == 3


def test_a_stale_parent(api, hub):
    parent = hub.commits(MODEL)[0].oid
    hub.put(MODEL, {"a.txt": b"a"})
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as caught:
        api.create_commit(MODEL, add(b__txt=b"b"), commit_message="Late", parent_commit=parent)
    assert caught.value.response.status_code == 412
    head = hub.commits(MODEL)[0].oid
    api.create_commit(MODEL, add(b__txt=b"b"), commit_message="In time", parent_commit=head)
    assert {"a.txt", "b.txt"} <= set(hub.files(MODEL))


def test_a_pull_request(api, hub, stranger):
    info = stranger.create_commit(
        MODEL, add(a__txt=b"a", model__safetensors=WEIGHTS), commit_message="Look", create_pr=True
    )
    assert (info.pr_revision, info.pr_num) == ("refs/pr/1", 1)
    assert "a.txt" not in hub.files(MODEL)
    assert hub.read(MODEL, "a.txt", "refs/pr/1") == b"a"
    api.create_commit(MODEL, add(b__txt=b"b"), commit_message="More", revision="refs/pr/1")
    assert "b.txt" in api.list_repo_files(MODEL, revision="refs/pr/1")
    refs = api.list_repo_refs(MODEL, include_pull_requests=True)
    assert [ref.name for ref in refs.pull_requests] == ["refs/pr/1"]
    with pytest.raises(HfHubHTTPError, match="write token"):
        stranger.create_commit(MODEL, add(a__txt=b"a"), commit_message="No")


def test_branches(api, hub):
    first = hub.commits(MODEL)[0].oid
    hub.put(MODEL, {"a.txt": b"a"})
    api.create_branch(MODEL, branch="of/mine", revision=first)
    with pytest.raises(HfHubHTTPError, match="already exists"):
        api.create_branch(MODEL, branch="of/mine")
    api.create_branch(MODEL, branch="of/mine", exist_ok=True)
    api.create_commit(MODEL, add(b__txt=b"b"), commit_message="There", revision="of/mine")
    assert set(hub.files(MODEL, "of/mine")) == {".gitattributes", "b.txt"}
    assert {ref.name for ref in api.list_repo_refs(MODEL).branches} == {"main", "of/mine"}
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(MODEL, add(b__txt=b"b"), commit_message="Nowhere", revision="unknown")


def test_copies_and_deletions(api, hub):
    hub.put(MODEL, {"a.txt": b"a", "old/one.txt": b"1", "old/deep/two.bin": b"2", "model.safetensors": WEIGHTS})
    operations = [
        CommitOperationDelete("a.txt"),
        CommitOperationDelete("old/"),
        CommitOperationCopy("model.safetensors", "new/model.safetensors"),
    ]
    api.create_commit(MODEL, operations, commit_message="Tidy")
    assert set(hub.files(MODEL)) == {".gitattributes", "model.safetensors", "new/model.safetensors"}
    with pytest.raises(EntryNotFoundError, match="A file with this name doesn't exist"):
        api.create_commit(MODEL, [CommitOperationDelete("a.txt")], commit_message="Once more")


def test_a_large_file_that_was_never_uploaded(api, hub):
    operation = CommitOperationAdd("model.safetensors", WEIGHTS)
    operation._upload_mode, operation._should_ignore, operation._is_uploaded = "lfs", False, True
    with pytest.raises(BadRequestError, match="does not exist. Offending file: model.safetensors"):
        api.create_commit(MODEL, [operation], commit_message="Nothing behind it")
    assert len(hub.commits(MODEL)) == 1


def test_a_card_that_is_wrong(api):
    with pytest.raises(ValueError, match='"tags" must be an array'):
        api.create_commit(MODEL, add(README__md=b"---\ntags: ewc\n---\n"), commit_message="Wrong")
    with pytest.raises(ValueError, match="while parsing"):
        api.create_commit(MODEL, add(README__md=b"---\na: [\n---\n"), commit_message="Wrong")
    index = {"model-index": [{"name": "digits", "results": [{"task": {}, "metrics": [{"type": "accuracy"}]}]}]}
    with pytest.raises(ValueError, match=r"results\[0\].task.type[\s\S]*metrics\[0\].value"):
        api.create_commit(MODEL, add(README__md=f"---\n{json.dumps(index)}\n---\n".encode()), commit_message="Wrong")


# What there is


def test_model_info(api, hub):
    commit = hub.put(MODEL, {"README.md": CARD, "model.safetensors": WEIGHTS})
    info = api.model_info(MODEL, files_metadata=True)
    assert (info.sha, info.private, info.gated, info.author) == (commit.oid, False, False, USER)
    assert info.card_data.license == "mit"
    assert {"ewc", "license:mit"} <= set(info.tags)
    assert info.last_modified.tzinfo is not None
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    lfs = files["model.safetensors"].lfs
    assert (lfs.sha256, lfs.size, lfs.pointer_size) == (sha256(WEIGHTS), len(WEIGHTS), 128)
    assert (files["README.md"].size, files["README.md"].lfs) == (len(CARD), None)
    assert api.model_info(MODEL, revision=commit.oid[:7]).siblings[0].size is None
    brief = api.model_info(MODEL, expand=["sha", "gated"])
    assert (brief.sha, brief.gated, brief.siblings) == (commit.oid, False, None)


def test_trees_and_paths(api, hub):
    hub.put(MODEL, {"model.safetensors": WEIGHTS, "sub/folder/a.txt": b"a", "sub/b.txt": b"bb"})
    top = {entry.path: entry for entry in api.list_repo_tree(MODEL)}
    assert set(top) == {".gitattributes", "model.safetensors", "sub"}
    assert isinstance(top["sub"], RepoFolder)
    assert top["model.safetensors"].lfs.sha256 == sha256(WEIGHTS)
    assert {e.path for e in api.list_repo_tree(MODEL, "sub", expand=True)} == {"sub/folder", "sub/b.txt"}
    hub.page_size = 2
    everything = {entry.path for entry in api.list_repo_tree(MODEL, recursive=True)}
    assert everything == {*top, "sub/folder", "sub/folder/a.txt", "sub/b.txt"}
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(MODEL, "nothing"))
    found = api.get_paths_info(MODEL, ["sub/b.txt", "sub", "nothing"], expand=True)
    assert [(type(one), one.path) for one in found] == [(RepoFile, "sub/b.txt"), (RepoFolder, "sub")]
    assert found[0].last_commit.title == "Upload files"
    assert (api.file_exists(MODEL, "sub/b.txt"), api.file_exists(MODEL, "nothing")) == (True, False)


# Downloads


def test_a_download_into_the_cache(api, hub, tmp_path):
    commit = hub.put(MODEL, {"model.safetensors": WEIGHTS, "sub/config é.json": b"{}"})
    path = Path(hf_hub_download(MODEL, "model.safetensors"))
    assert path.read_bytes() == WEIGHTS
    assert path.is_relative_to(tmp_path / "huggingface" / "hub")
    assert path.resolve().name == sha256(WEIGHTS)
    assert path.parent.name == commit.oid
    config = Path(api.hf_hub_download(MODEL, "sub/config é.json", revision=commit.oid))
    assert config.resolve().name == hub.files(MODEL)["sub/config é.json"].blob_id
    hub.clear()
    assert hf_hub_download(MODEL, "model.safetensors") == str(path)
    assert [str(request) for request in hub.requests] == [f"HEAD /{MODEL}/resolve/main/model.safetensors"]
    there = {path.name for path in Path(snapshot_download(MODEL)).iterdir()}
    assert there == {".gitattributes", "model.safetensors", "sub"}


def test_the_storage_never_sees_the_token(api, hub):
    api.create_commit(MODEL, add(model__safetensors=WEIGHTS), commit_message="Up")
    hf_hub_download(MODEL, "model.safetensors")
    get_session().get(hf_hub_url(MODEL, "model.safetensors"), headers={"authorization": f"Bearer {TOKEN}"})
    seen = [request for request in hub.requests if request.origin == "storage"]
    assert [(r.method, r.status) for r in seen] == [("PUT", 200), ("GET", 200), ("GET", 200)]
    assert not any("authorization" in request.headers or TOKEN in str(request) for request in seen)
    assert all("X-Signature=" in request.path for request in seen)
    address = hub.storage_url + seen[-1].path
    refused = get_session().get(address, headers={"authorization": f"Bearer {TOKEN}"})
    assert (refused.status_code, "InvalidArgument" in refused.text) == (400, True)
    assert get_session().get(address[:-1]).status_code == 403


@pytest.mark.parametrize("name", ["small.txt", "large.bin"])
def test_ranges(api, hub, name):
    data = bytes(range(100))
    hub.put(MODEL, {name: data})

    def get(wanted):
        answer = get_session().get(hf_hub_url(MODEL, name), headers={"range": wanted})
        return answer.status_code, answer.content, answer.headers.get("content-range")

    assert get("bytes=10-19") == (206, data[10:20], "bytes 10-19/100")
    assert get("bytes=90-") == (206, data[90:], "bytes 90-99/100")
    assert get("bytes=90-500") == (206, data[90:], "bytes 90-99/100")
    assert get("bytes=-5") == (206, data[-5:], "bytes 95-99/100")
    assert get("bytes=100-")[::2] == (416, "bytes */100")
    assert get("bytes=5-2") == (200, data, None)
    head = get_session().head(hf_hub_url(MODEL, name))
    assert (head.status_code, head.headers["content-length"]) == (200, "100")


def test_reading_a_part_of_a_file(api, hub):
    hub.put(MODEL, {"model.safetensors": WEIGHTS})
    metadata = api.parse_safetensors_file_metadata(MODEL, "model.safetensors")
    assert metadata.metadata == {"made": "here"}
    assert metadata.tensors["weight"].shape == [3, 4]
    system = HfFileSystem()
    with system.open(f"{MODEL}/model.safetensors", block_size=64) as file:
        file.seek(len(WEIGHTS) - 8)
        assert file.read() == WEIGHTS[-8:]
    with system.open(f"{MODEL}@main/model.safetensors", cache_type="none") as file:
        assert file.read(8) == WEIGHTS[:8]
    assert (hub.asked("/cdn/")[-1].status, hub.asked("/cdn/")[-1].sent) == (206, 8)
    assert f"{MODEL}/model.safetensors" in system.ls(MODEL, detail=False)


def test_bytes_other_than_promised(api, hub):
    hub.put(MODEL, {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    hub.corrupt(r"filename=model\.safetensors")
    got = Path(hf_hub_download(MODEL, "model.safetensors")).read_bytes()
    assert (got[:-1], len(got)) == (WEIGHTS[:-1], len(WEIGHTS))
    assert got != WEIGHTS
    assert Path(hf_hub_download(MODEL, "config.json")).read_bytes() == b"{}"


# Who may do what


def test_gated(api, hub, stranger):
    hub.create(f"{USER}/gated", gated=True)
    hub.put(f"{USER}/gated", {"config.json": b"{}"})
    assert stranger.model_info(f"{USER}/gated").gated == "manual"
    with pytest.raises(GatedRepoError, match="not in the authorized list") as caught:
        stranger.hf_hub_download(f"{USER}/gated", "config.json")
    assert caught.value.response.status_code == 403
    with pytest.raises(GatedRepoError, match="Please log in") as caught:
        api.hf_hub_download(f"{USER}/gated", "config.json", token=False)
    assert caught.value.response.status_code == 401
    hub.repos[f"{USER}/gated"].readers.add("other")
    assert stranger.hf_hub_download(f"{USER}/gated", "config.json")


@pytest.mark.parametrize("name", ["private", "missing"])
def test_private_and_missing_look_alike(api, hub, stranger, name):
    hub.create(f"{USER}/private", private=True)
    for token, status in ((OTHER, 404), (False, 401)):
        with pytest.raises(RepositoryNotFoundError) as caught:
            api.model_info(f"{USER}/{name}", token=token)
        assert caught.value.response.status_code == status
        with pytest.raises(RepositoryNotFoundError) as caught:
            api.hf_hub_download(f"{USER}/{name}", "config.json", token=token)
        assert caught.value.response.status_code == status
    assert api.repo_exists(f"{USER}/{name}") == (name == "private")


def test_tokens_without_rights(api, hub, stranger):
    hub.add_user(USER, "hf_reads", read_only=True)
    for token in (OTHER, "hf_reads"):
        with pytest.raises(HfHubHTTPError, match="403 Forbidden") as caught:
            api.create_commit(MODEL, add(a__txt=b"a"), commit_message="No", token=token)
        assert caught.value.response.status_code == 403
    for ask in (api.whoami, lambda token: api.model_info(MODEL, token=token)):
        with pytest.raises(HfHubHTTPError, match="Invalid (user token|credentials)") as caught:
            ask(token="hf_unknown")
        assert caught.value.response.status_code == 401
        assert not isinstance(caught.value, RepositoryNotFoundError)


def test_what_is_not_there(api, hub):
    with pytest.raises(RevisionNotFoundError):
        api.model_info(MODEL, revision="unknown")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(MODEL, "config.json", revision="unknown")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(MODEL, "config.json")


# What goes wrong


def test_a_download_that_is_cut_goes_on_where_it_stopped(api, hub):
    data = bytes(range(256)) * (12 << 12)
    hub.put(MODEL, {"model.safetensors": data})
    fault = hub.cut("GET /cdn/", after=11 << 20)
    assert Path(hf_hub_download(MODEL, "model.safetensors")).read_bytes() == data
    first, second = hub.asked("GET /cdn/")
    # What the client had of its chunk of 10 MiB that was not full is lost.
    assert second.headers["range"] == f"bytes={10 << 20}-"
    assert (first.status, first.sent, second.status, second.sent) == (200, 11 << 20, 206, 2 << 20)
    assert fault.seen == 1


def test_a_reset_ends_a_download(api, hub):
    hub.put(MODEL, {"model.safetensors": WEIGHTS})
    hub.cut("GET /cdn/", after=100, abruptly=True)
    with pytest.raises(httpx2.ReadError):
        hf_hub_download(MODEL, "model.safetensors")
    assert len(hub.asked("GET /cdn/")) == 1


def test_an_upload_that_is_cut_starts_again(api, hub):
    data = bytes(1 << 20)
    hub.cut("PUT /upload/", after=1 << 19)
    api.create_commit(MODEL, add(model__safetensors=data), commit_message="Twice")
    assert [(r.status, r.received) for r in hub.asked("PUT ")] == [(None, 1 << 19), (200, 1 << 20)]
    assert hub.read(MODEL, "model.safetensors") == data


def test_a_commit_whose_answer_is_lost(api, hub):
    hub.lose("/commit/main")
    with pytest.raises(httpx2.RemoteProtocolError):
        api.create_commit(MODEL, add(a__txt=b"a"), commit_message="Lost")
    assert len(hub.asked("/commit/")) == 1
    assert hub.commits(MODEL)[0].title == "Lost"


def test_too_many_requests(api, hub):
    hub.fail("preupload", status=429, headers={"Retry-After": "0"})
    api.create_commit(MODEL, add(a__txt=b"a"), commit_message="Later")
    assert [request.status for request in hub.asked("preupload")] == [429, 200]
    hub.fail("GET /api/models/", status=429, headers={"Retry-After": "0"})
    with pytest.raises(HfHubHTTPError, match="429"):
        api.model_info(MODEL)


def test_a_hub_that_is_down(api, hub):
    hub.fail(r"/commit/|GET /api/models/\S+$", status=500, body='{"error": "Internal Error - here"}', times=None)
    with pytest.raises(HfHubHTTPError, match="Internal Error - here") as caught:
        api.model_info(MODEL)
    assert caught.value.response.status_code == 500
    with pytest.raises(HfHubHTTPError, match="500"):
        api.create_commit(MODEL, add(a__txt=b"a"), commit_message="No")
    assert len(hub.asked("/commit/")) == 1
    hub.clear()
    hub.fail("HEAD ", status=404, method="HEAD", headers={"X-Error-Code": "RepoNotFound"})
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download(MODEL, "config.json")
    hub.fail("HEAD ", status=418)
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download(MODEL, "config.json")


# The server itself


def test_answers_come_at_once(api, hub):
    hub.put(MODEL, {"model.safetensors": WEIGHTS})
    api.model_info(MODEL)
    start = time.perf_counter()
    for _ in range(20):
        api.model_info(MODEL)
        api.get_paths_info(MODEL, ["model.safetensors"])
    assert time.perf_counter() - start < 20 * 0.08  # with one wait for an acknowledgement it would be more


def test_a_body_in_chunks(hub):
    card = json.dumps({"content": CARD.decode()}).encode()
    for _ in range(2):  # over one connection, which must not be out of step after the first
        answer = get_session().post(f"{hub.url}/api/validate-yaml", content=iter([card[:10], card[10:]]))
        assert answer.json() == {"errors": [], "warnings": []}
    assert [request.received for request in hub.requests] == [len(card)] * 2


def test_it_stops_whatever_goes_on():
    threads = set(threading.enumerate())
    with HubServer() as hub, httpx2.Client(trust_env=False) as client:
        hub.create(MODEL)
        hub.delay("refs", seconds=60)
        errors = []

        def ask():
            try:
                client.get(f"{hub.url}/api/models/{MODEL}/refs")
            except httpx2.HTTPError as error:
                errors.append(error)

        waiting = threading.Thread(target=ask)
        waiting.start()
        while not hub.requests:
            time.sleep(0.001)
        client.get(f"{hub.url}/api/models/{MODEL}")
        start = time.perf_counter()
        hub.stop()
        waiting.join()
        assert time.perf_counter() - start < 1
        assert set(threading.enumerate()) == threads
        assert len(errors) <= 1


def test_child_processes_know_it_too(api, hub, tmp_path):
    hub.put(MODEL, {"model.safetensors": WEIGHTS})
    program = "import sys, huggingface_hub as h; print(h.hf_hub_download(*sys.argv[1:]), h.whoami()['name'])"
    done = subprocess.run(
        [sys.executable, "-c", program, MODEL, "model.safetensors"], capture_output=True, text=True, check=True
    )
    path, name = done.stdout.split()
    assert (name, Path(path).is_relative_to(tmp_path / "huggingface" / "hub")) == (USER, True)
    assert all("torch" not in request.headers["user-agent"] for request in hub.requests)
