#!/usr/bin/env python3
"""Brings a model's files to a host, whole and verified, and converts them for TileRT. Standard library only.

A folder is complete when it holds tilert-manifest.json, which is written last and lists every file with its size
and hash. So a complete folder behind any static web server is a mirror for other hosts.

Prints one JSON object when it has succeeded; progress, and what is wrong where it has not, on standard error.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import fnmatch
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

MANIFEST = "tilert-manifest.json"
PARTIAL = ".tilert-partial"
VERIFIED = ".tilert-verified.json"
LOCK = ".tilert-lock"
INDEX = "model.safetensors.index.json"
"""What a checkpoint of several files is read by; the converter reads one and writes one."""
CHUNK = 4 << 20
ATTEMPTS = 6
"""Connections in a row that may bring nothing before a file is given up."""


class Failed(Exception):
    """What is wrong and what to do, for the operator."""


def gb(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.3f} MB"


# --- what there is to have ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """One file. `sha256` is its content's; a small file of Hugging Face has only git's own hash, `git_sha1`."""

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts or "\\" in self.path or "\0" in self.path:
            raise Failed(f"manifest: {self.path!r} leaves the folder; the source is not to be trusted")
        if parts[0] in {PARTIAL, VERIFIED, LOCK, MANIFEST}:
            raise Failed(f"manifest: {self.path!r} is a name of this program's own")
        if not (isinstance(self.size, int) and self.size >= 0):
            raise Failed(f"manifest: {self.path!r} has size {self.size!r}")
        if not (re.fullmatch("[0-9a-f]{64}", self.sha256) or re.fullmatch("[0-9a-f]{40}", self.git_sha1)):
            raise Failed(f"manifest: {self.path!r} has no sha256")

    def digest(self) -> Any:
        """A hash object to be fed the content."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)

    @property
    def hash(self) -> str:
        """What the digest must be."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True)
class Manifest:
    """Every file of one revision. `made_by` says how converted weights came about."""

    revision: str
    files: tuple[File, ...]
    made_by: dict[str, str]

    def select(self, patterns: list[str]) -> Manifest:
        """The files whose path matches one of the shell patterns. Raises Failed when none does."""
        kept = tuple(f for f in self.files if any(fnmatch.fnmatch(f.path, p) for p in patterns))
        if not kept:
            raise Failed(f"no file of the source matches {', '.join(patterns)}")
        return replace(self, files=kept)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    def text(self) -> str:
        """As it is written."""
        files = [
            {k: v for k, v in asdict(f).items() if v != ""} for f in sorted(self.files, key=lambda f: f.path)
        ]
        return (
            json.dumps({"revision": self.revision, "made_by": self.made_by, "files": files}, indent=1) + "\n"
        )

    def sha256(self) -> str:
        """What a site pins."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @classmethod
    def read(cls, text: str | bytes, where: str) -> Manifest:
        """From its text. Raises Failed."""
        try:
            data = json.loads(text)
            files = tuple(File(**entry) for entry in data["files"])
            return cls(str(data["revision"]), files, dict(data.get("made_by", {})))
        except (ValueError, TypeError, KeyError) as error:
            raise Failed(f"{where}: this is no manifest ({error})") from None


def complete(folder: Path) -> Manifest | None:
    """The manifest of a folder that is complete: it is there, and every file has its size. None otherwise."""
    try:
        found = Manifest.read((folder / MANIFEST).read_text(), str(folder / MANIFEST))
        whole = all((folder / f.path).stat().st_size == f.size for f in found.files)
    except OSError:
        return None
    return found if whole else None


def hash_file(path: Path, digest: Any) -> str:
    """The digest of a file's content."""
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def result(manifest: Manifest, *, changed: bool) -> dict[str, Any]:
    """What a command prints."""
    return {
        "changed": changed,
        "files": len(manifest.files),
        "bytes": manifest.size,
        "manifest_sha256": manifest.sha256(),
    }


# --- where it comes from --------------------------------------------------------------------------------------------


class Source(Protocol):
    """Somewhere the files are."""

    def manifest(self) -> Manifest:
        """What there is. Raises Failed."""

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """A stream of the file, and the offset at which it really begins: `offset`, or 0. Raises OSError."""


class SameHostAuthorization(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and sends the token to no other host: file stores have addresses that are keys themselves."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The request that follows, without the token when it goes elsewhere."""
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


class Http:
    """Files below a URL."""

    def __init__(self, base: str, token: str, timeout_s: float) -> None:
        self.base, self.token, self.timeout_s = base.rstrip("/"), token, timeout_s
        self.opener = urllib.request.build_opener(SameHostAuthorization)

    def get(self, url: str, offset: int = 0) -> Any:
        """The answer to GET, from `offset` on if the server can."""
        request = urllib.request.Request(url)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        return self.opener.open(request, timeout=self.timeout_s)

    def ask(self, url: str) -> bytes:
        """A small document. Raises Failed with the remedy."""
        try:
            with self.get(url) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            hint = {
                401: "give a token",
                403: "accept the model's licence, or give a token",
                404: "correct the name",
            }
            raise Failed(f"{url} answers {error.code}; {hint.get(error.code, 'try later')}") from None
        except OSError as error:
            raise Failed(
                f"{url} cannot be reached: {error}. Check proxy and firewall, or use a mirror"
            ) from None

    def stream(self, url: str, offset: int) -> tuple[BinaryIO, int]:
        """A file's stream, and where it begins."""
        answer = self.get(url, offset)
        begins = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
        return answer, int(begins[1]) if answer.status == 206 and begins else 0


class Mirror(Http):
    """A complete folder behind a web server."""

    def manifest(self) -> Manifest:
        """The folder's own."""
        url = f"{self.base}/{MANIFEST}"
        return Manifest.read(self.ask(url), url)

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """The file below the folder's URL."""
        return self.stream(f"{self.base}/{urllib.parse.quote(file.path)}", offset)


class HuggingFace(Http):
    """A revision of a repository. Only a whole commit is one: a branch moves."""

    def __init__(self, repository: str, revision: str, endpoint: str, token: str, timeout_s: float) -> None:
        super().__init__(endpoint, token, timeout_s)
        if not re.fullmatch("[0-9a-f]{40}", revision):
            raise Failed(f"revision {revision!r}: give the commit's 40 hex digits; a branch or tag can move")
        self.repository, self.revision = repository, revision

    def manifest(self) -> Manifest:
        """From the repository's listing."""
        url = f"{self.base}/api/models/{self.repository}/revision/{self.revision}?blobs=true"
        try:
            files = [
                File(s["rfilename"], s["size"], (s.get("lfs") or {}).get("sha256", ""), s.get("blobId", ""))
                for s in json.loads(self.ask(url))["siblings"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise Failed(f"{url}: this is no listing of a model ({error})") from None
        return Manifest(self.revision, tuple(f for f in files if f.path != ".gitattributes"), {})

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """The file of this revision."""
        path = urllib.parse.quote(file.path)
        return self.stream(f"{self.base}/{self.repository}/resolve/{self.revision}/{path}", offset)


class Folder:
    """A folder of this host: a disk that was brought along, or a share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self) -> Manifest:
        """The folder's own, or one made by reading all of it."""
        if not self.path.is_dir():
            raise Failed(f"{self.path}: there is no such folder. Mount it, or name another source")
        if (self.path / MANIFEST).exists():
            return Manifest.read((self.path / MANIFEST).read_text(), str(self.path / MANIFEST))
        return listing(self.path)

    def open(self, file: File, offset: int) -> tuple[BinaryIO, int]:
        """The file itself."""
        stream = (self.path / file.path).open("rb")
        stream.seek(offset)
        return stream, offset


def listing(folder: Path, made_by: dict[str, str] | None = None) -> Manifest:
    """A manifest of what is in a folder, by reading all of it. Raises Failed when the checkpoint is not whole."""
    check_checkpoint(folder)
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.relative_to(folder).parts[0].startswith(".") and path.name != MANIFEST
    ]
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(lambda path: hash_file(path, hashlib.sha256()), paths))
    files = [
        File(path.relative_to(folder).as_posix(), path.stat().st_size, found)
        for path, found in zip(paths, hashes, strict=True)
    ]
    together = "\n".join(f"{f.path} {f.sha256}" for f in files)
    return Manifest(hashlib.sha256(together.encode()).hexdigest(), tuple(files), made_by or {})


def check_checkpoint(folder: Path) -> None:
    """Every safetensors file ends where its header says, and every file that an index names is there. Raises Failed."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise Failed(f"{folder} holds no *.safetensors: it is no checkpoint")
    for index in folder.glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise Failed(
                f"{folder}: {index.name} names {len(missing)} files that are not there, such as {missing[0]}"
            )
    for path in weights:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = path.stat().st_size
            try:
                if length > size:
                    raise ValueError
                header = json.loads(stream.read(length))
                end = max(
                    (t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0
                )
            except (ValueError, KeyError, TypeError):
                raise Failed(f"{path}: its header cannot be read; the file is damaged or cut") from None
        if 8 + length + end != size:
            raise Failed(f"{path}: it has {size} bytes, and its header says {8 + length + end}; it is cut")


def source_of(name: str, options: argparse.Namespace) -> Source:
    """hf:ORG/NAME, http(s)://..., or a folder. Raises Failed."""
    token = ""
    if options.token_file:
        try:
            token = Path(options.token_file).read_text().strip()
        except OSError as error:
            raise Failed(f"token file {options.token_file}: {error.strerror}") from None
    if name.startswith("hf:"):
        return HuggingFace(name[3:], options.revision, options.endpoint, token, options.timeout_s)
    if name.startswith(("http://", "https://")):
        return Mirror(name, token, options.timeout_s)
    if name.startswith("/"):
        return Folder(Path(name))
    raise Failed(f"source {name!r}: use hf:ORG/NAME, http(s)://HOST/PATH or an absolute folder")


# --- one at a time ----------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path, file: Path, wait_s: float) -> Iterator[None]:
    """The right to fill a folder, across processes and, on a share, across hosts: POSIX locks work over NFS too.

    The kernel gives the lock back when its holder ends, however it ends. Raises Failed with the holder's name.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as lock:
        deadline, told = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                if time.monotonic() >= deadline:
                    raise Failed(
                        f"{folder} is being filled by {holder}; wait for it, or end it there"
                    ) from None
                if not told:
                    print(f"waiting for {holder}, which fills {folder}", file=sys.stderr, flush=True)
                told = True
                time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def need_disk(folder: Path, count: int, reserve: int) -> None:
    """Raises Failed with the numbers when `count` bytes do not fit beside `reserve`."""
    there = os.statvfs(folder if folder.exists() else folder.parent)
    free, total = there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize
    if count and free < count + reserve:
        raise Failed(
            f"{folder} needs {gb(count)} more and {gb(reserve)} to spare, and the disk has {gb(free)} free of "
            f"{gb(total)}. Free {gb(count + reserve - free)}, or name another folder"
        )


def need_memory(meminfo: Path, count: int, what: str) -> None:
    """Raises Failed with the numbers when less than `count` bytes of memory are available."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)
    available = int(found[1]) * 1024 if found else 0
    if available < count:
        raise Failed(
            f"{what} needs {gb(count)} of memory, and {gb(available)} are available. Stop other services here, or "
            "convert on a GPU host with more memory and name its folder or URL as the source of the converted weights"
        )


def write_last(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)


# --- fetching ---------------------------------------------------------------------------------------------------------


class Progress:
    """A line every so often, and the last one in a file that an operator may look at."""

    def __init__(self, total: int, file: Path, every_s: float = 10) -> None:
        self.total, self.file, self.every_s = total, file, every_s
        self.done, self.start, self.last = 0, time.monotonic(), 0.0
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        """More bytes are there."""
        with self.lock:
            self.done += count
            now = time.monotonic()
            if now - self.last < self.every_s:
                return
            self.last = now
            rate = self.done / max(now - self.start, 1e-3)
            left = (self.total - self.done) / max(rate, 1)
            line = f"{gb(self.done)} of {gb(self.total)}, {gb(rate)}/s, {left / 60:.0f} min left"
            print(line, file=sys.stderr, flush=True)
            self.file.write_text(line + "\n")


def fetch_file(source: Source, file: File, part: Path, progress: Progress, retry_s: float) -> None:
    """Bring one file into `part`, going on where an earlier try ended. Raises Failed."""
    part.parent.mkdir(parents=True, exist_ok=True)
    failures, reason = 0, ""
    while failures < ATTEMPTS:
        have = part.stat().st_size if part.exists() else 0
        if have > file.size:
            part.unlink()
            have = 0
        before = have
        try:
            if have < file.size or not part.exists():
                stream, begins = source.open(file, have)
                with stream, part.open("r+b" if part.exists() else "wb") as out:
                    out.seek(begins)
                    out.truncate()
                    have = begins
                    while have < file.size and (chunk := stream.read(min(CHUNK, file.size - have))):
                        out.write(chunk)
                        have += len(chunk)
                        progress.add(len(chunk))
                    out.flush()
                    os.fsync(out.fileno())
            if have == file.size:
                found = hash_file(part, file.digest())
                if found == file.hash:
                    return
                # What was there before may be another revision's: the whole of it again.
                part.unlink()
                reason = f"its hash is {found} and not {file.hash}"
                before = have = 0
            else:
                reason = f"the connection ended after {have} of {file.size} bytes"
        except urllib.error.HTTPError as error:
            reason = f"the source answers {error.code}"
            if error.code in {401, 403, 404, 410}:
                break
            if error.code == 416:
                part.unlink(missing_ok=True)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}:
                raise Failed(f"{part}: {error.strerror}") from None
            reason = str(error)
        except Exception as error:  # http.client's own: an answer that breaks off
            reason = f"{type(error).__name__}: {error}"
        failures = 0 if have > before else failures + 1
        time.sleep(min(retry_s * 2**failures, 30))
    raise Failed(f"{file.path}: {reason}. What is there is kept: run again to go on, or name another source")


def fetch(options: argparse.Namespace) -> dict[str, Any]:
    """Fill a folder from a source; nothing is asked of the files' content where it is known to be right."""
    dest, source = Path(options.dest), source_of(options.source, options)
    with locked(dest, dest / LOCK, options.lock_wait_s):
        want = source.manifest()
        if options.manifest_sha256 and want.sha256() != options.manifest_sha256:
            raise Failed(
                f"the source's manifest has sha256 {want.sha256()}, and {options.manifest_sha256} is pinned"
            )
        if options.revision and want.revision != options.revision:
            raise Failed(f"the source holds revision {want.revision}, and {options.revision} is asked for")
        want = want.select(options.include)
        there = complete(dest)
        if there == want:
            return result(want, changed=False)
        (dest / PARTIAL).mkdir(parents=True, exist_ok=True)
        (dest / MANIFEST).unlink(missing_ok=True)

        verified_file = dest / VERIFIED
        try:
            verified = json.loads(verified_file.read_text())
        except (OSError, ValueError):
            verified = {}
        missing = []
        for file in want.files:
            path = dest / file.path
            if not path.is_file() or path.stat().st_size != file.size:
                missing.append(file)
                continue
            known = [file.hash, path.stat().st_mtime_ns]
            if verified.get(file.path) != known and hash_file(path, file.digest()) != file.hash:
                missing.append(file)
            else:
                verified[file.path] = known
        parts = {file: dest / PARTIAL / file.path for file in missing}
        have = {file: min(part.stat().st_size, file.size) for file, part in parts.items() if part.exists()}
        need = sum(file.size for file in missing) - sum(have.values())
        need_disk(dest, need, options.reserve_bytes)
        progress = Progress(need, dest / PARTIAL / "progress")

        def bring(file: File) -> None:
            fetch_file(source, file, parts[file], progress, options.retry_s)
            path = dest / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            parts[file].replace(path)
            with progress.lock:
                verified[file.path] = [file.hash, path.stat().st_mtime_ns]
                verified_file.write_text(json.dumps(verified))

        with ThreadPoolExecutor(options.jobs) as pool:
            for future in [pool.submit(bring, file) for file in missing]:
                try:
                    future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise

        # Files of a former revision would be loaded beside the new ones.
        wanted = {file.path for file in want.files}
        for path in sorted(dest.rglob("*")):
            name = path.relative_to(dest).as_posix()
            if path.is_file() and name in verified and name not in wanted:
                path.unlink()
                del verified[name]
        verified_file.write_text(json.dumps(verified))
        shutil.rmtree(dest / PARTIAL)
        write_last(dest / MANIFEST, want.text())
        return result(want, changed=True) | {"fetched_bytes": need}


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """Read every file of a complete folder again."""
    folder = Path(options.dest)
    found = complete(folder)
    if found is None:
        raise Failed(f"{folder} is not complete: {MANIFEST} is missing, or a file it lists has another size")
    for file in found.files:
        if hash_file(folder / file.path, file.digest()) != file.hash:
            raise Failed(
                f"{folder / file.path} is damaged: its hash is not the manifest's. Remove it and fetch again"
            )
    return result(found, changed=False)


def seal(options: argparse.Namespace) -> dict[str, Any]:
    """Make a folder that was filled by hand a complete one: read all of it, and write its manifest."""
    folder = Path(options.dest)
    with locked(folder, folder / LOCK, options.lock_wait_s):
        there = complete(folder)
        if there is None:
            there = listing(folder)
            known = {f.path: [f.sha256, (folder / f.path).stat().st_mtime_ns] for f in there.files}
            (folder / VERIFIED).write_text(json.dumps(known))
            write_last(folder / MANIFEST, there.text())
            return result(there, changed=True)
        return result(there, changed=False)


# --- converting -------------------------------------------------------------------------------------------------------


def accompany(model: Path, source: Manifest, partial: Path) -> None:
    """Copy what engines and tokenizers read beside the weights, where the converter did not write its own."""
    for file in source.files:
        beside = "/" not in file.path and not file.path.endswith((".safetensors", ".bin", ".index.json"))
        if beside and not (partial / file.path).exists():
            shutil.copyfile(model / file.path, partial / file.path)


def convert(options: argparse.Namespace) -> dict[str, Any]:
    """Convert a complete checkpoint. Until all of it is there the result is called NAME.partial."""
    model, dest = Path(options.model_dir), Path(options.dest)
    if dest.is_mount():
        raise Failed(
            f"{dest} is a mount point, and the result gets its name by renaming. Name a folder below it"
        )
    with locked(dest, dest.parent / f".{dest.name}.lock", options.lock_wait_s):
        source = complete(model)
        if source is None:
            raise Failed(f"{model} is not complete: fetch it first, or seal it if it was filled by hand")
        if INDEX not in {file.path for file in source.files}:
            raise Failed(
                f"{model} has no {INDEX}, which the converter starts from: fetch the whole checkpoint"
            )
        made_by = {
            "from": source.sha256(),
            "model_type": options.model_type,
            "converter": options.converter_version,
        }
        there = complete(dest)
        if there and there.made_by == made_by:
            return result(there, changed=False)
        weights = sum(file.size for file in source.files if file.path.endswith(".safetensors"))
        partial = dest.with_name(dest.name + ".partial")
        # The converter cannot go on where it was cut: what is there is in the way.
        shutil.rmtree(partial, ignore_errors=True)
        need_disk(dest, int(weights * options.disk_factor), options.reserve_bytes)
        need_memory(Path(options.meminfo), int(weights * options.memory_factor), "the conversion")
        partial.mkdir()
        command = [*options.converter, "--model_type", options.model_type, "--model_dir", str(model)]
        done = subprocess.run(
            [*command, "--save_dir", str(partial)], stdout=sys.stderr, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise Failed(f"the converter ended with {done.returncode}; its output is above")
        # Written last.
        if not (partial / INDEX).is_file():
            raise Failed(
                f"the converter wrote no {INDEX} into {partial}: it did not end; its output is above"
            )
        accompany(model, source, partial)
        made = listing(partial, made_by)
        for file in made.files:
            with (partial / file.path).open("rb") as stream:
                os.fsync(stream.fileno())
        write_last(partial / MANIFEST, made.text())
        if dest.exists():
            old = dest.with_name(dest.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            dest.replace(old)
            partial.replace(dest)
            shutil.rmtree(old)
        else:
            partial.replace(dest)
        return result(made, changed=True)


# --- handing on -------------------------------------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> None:
    """Serve a complete folder, and nothing but the files of its manifest, until ended."""
    folder = Path(options.dest)
    found = complete(folder)
    if found is None:
        raise Failed(f"{folder} is not complete, so nobody gets it from here")
    known = {f"/{urllib.parse.quote(file.path)}": folder / file.path for file in found.files}
    known[f"/{MANIFEST}"] = folder / MANIFEST

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            path = known.get(self.path)
            if path is None:
                self.send_error(404)
                return
            size = path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(asked[1]) if asked else 0
            if begin >= max(size, 1):
                self.send_error(416)
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(size - begin))
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
            self.end_headers()
            with path.open("rb") as stream:
                stream.seek(begin)
                self.wfile.flush()
                while begin < size:
                    sent = os.sendfile(self.connection.fileno(), stream.fileno(), begin, size - begin)
                    if not sent:
                        return
                    begin += sent

        def log_message(self, *_: Any) -> None:
            """Quiet: a mirror is asked thousands of times."""

    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    server_class = type("Server", (http.server.ThreadingHTTPServer,), {"address_family": family})
    with server_class((options.host, options.port), Handler) as server:
        print(f"serving {folder} at port {server.server_address[1]}", file=sys.stderr, flush=True)
        if address := os.environ.get("NOTIFY_SOCKET"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.sendto(b"READY=1", address.replace("@", "\0", 1))
        server.serve_forever()


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tilert-weights", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=help)
        found.set_defaults(run=run)
        found.add_argument("dest", help="folder")
        found.add_argument(
            "--lock-wait-s", type=float, default=21600, help="how long to wait for another who fills it"
        )
        found.add_argument(
            "--reserve-bytes", type=int, default=10 << 30, help="bytes of the disk to leave free"
        )
        return found

    fetching = command("fetch", fetch, "fill a folder from a source")
    fetching.add_argument("source", help="hf:ORG/NAME, http(s)://HOST/PATH, or a folder")
    fetching.add_argument("--revision", default="", help="commit (hf), or the manifest's revision")
    fetching.add_argument("--manifest-sha256", default="", help="refuse a source with another manifest")
    fetching.add_argument("--include", action="append", help="shell pattern of paths; all without it")
    fetching.add_argument("--endpoint", default="https://huggingface.co", help="Hugging Face, or one like it")
    fetching.add_argument("--token-file", default="", help="file with a token")
    fetching.add_argument("--jobs", type=int, default=4, help="files at a time")
    fetching.add_argument("--timeout-s", type=float, default=60, help="longest silence of a connection")
    fetching.add_argument("--retry-s", type=float, default=1, help="first pause after a failure")
    command("verify", verify, "read every file again")
    command("seal", seal, "make a folder that was filled by hand a complete one")
    converting = command("convert", convert, "convert a checkpoint for TileRT")
    converting.add_argument("--model-dir", required=True)
    converting.add_argument("--model-type", required=True)
    converting.add_argument("--converter-version", required=True)
    converting.add_argument(
        "--disk-factor", type=float, default=1.05, help="size of the result over that of the source"
    )
    converting.add_argument(
        "--memory-factor", type=float, default=1.05, help="memory over the size of the source"
    )
    converting.add_argument("--meminfo", default="/proc/meminfo")
    converting.add_argument(
        "--converter", nargs=argparse.REMAINDER, required=True, help="the converter's command; comes last"
    )
    serving = command("serve", serve, "serve a complete folder to other hosts")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    if getattr(options, "include", ...) is None:
        options.include = ["*"]
    try:
        result = options.run(options)
    except Failed as failure:
        print(f"tilert-weights: {failure}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
