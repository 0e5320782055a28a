"""The Hub's own client, `huggingface_hub`, against `hub_server.py`. HF_ENDPOINT and HF_TOKEN name the server.

hub_client.py check FOLDER      whether the server is one for this client; FOLDER is an empty one
hub_client.py upload FOLDER     uploads a folder
hub_client.py download FOLDER   downloads the repository into a folder
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The server has no Xet, and these tests no telemetry.
os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

REPO = "org/models"


def download(folder: Path, **which: str) -> dict[str, bytes]:
    snapshot_download(REPO, local_dir=folder, **which)
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def fails(error: type[Exception], work: Callable, *arguments: Any, **named: Any) -> Any:
    try:
        work(*arguments, **named)
    except error as found:
        return found
    raise AssertionError(f"no {error.__name__}")


def check(folder: Path) -> None:
    api = HfApi()
    files = {"a.zst": os.urandom(300_000), "sub/b%2Fc.json": b'{"x":1}\n', "empty.txt": b""}
    for name, data in files.items():
        path = folder / "up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    before = api.repo_info(REPO).sha
    made = api.upload_folder(repo_id=REPO, folder_path=folder / "up")
    assert api.repo_info(REPO).sha == made.oid != before
    got = download(folder / "down")
    assert files == {name: got[name] for name in files}
    assert set(api.list_repo_files(REPO)) == {".gitattributes", *files}
    tree = {entry.path: entry for entry in api.list_repo_tree(REPO, recursive=True) if hasattr(entry, "size")}
    assert tree["a.zst"].lfs.size == 300_000 and tree["sub/b%2Fc.json"].lfs is None
    assert [ref.name for ref in api.list_repo_refs(REPO).branches] == ["main"]
    # The head has moved.
    again = {"repo_id": REPO, "path_or_fileobj": b"x", "path_in_repo": "x"}
    refused = fails(HfHubHTTPError, api.upload_file, **again, parent_commit=before)
    assert refused.response.status_code == 412, refused
    api.upload_file(**again, parent_commit=made.oid)
    api.delete_file("x", REPO)
    assert not api.file_exists(REPO, "x")
    assert "a.zst" not in download(folder / "tag", revision="v1")
    fails(EntryNotFoundError, api.hf_hub_download, REPO, "x")
    fails(RevisionNotFoundError, api.repo_info, REPO, revision="v9")
    fails(RepositoryNotFoundError, api.repo_info, "org/other")
    refused = fails(HfHubHTTPError, HfApi(token="wrong").repo_info, REPO)
    assert refused.response.status_code == 401, refused


command, folder = sys.argv[1], Path(sys.argv[2])
if command == "check":
    check(folder)
elif command == "upload":
    HfApi().upload_folder(repo_id=REPO, folder_path=folder)
else:
    download(folder)
