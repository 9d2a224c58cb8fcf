"""tilert-weights, with real folders, HTTP and processes: cut, damaged, doubled, too large, and right or refused."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "roles/model_weights/files/tilert_weights.py"
MANIFEST = "tilert-manifest.json"
QUICK = ["--reserve-bytes", "0", "--retry-s", "0.01"]


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    environment = {**os.environ, "no_proxy": "*"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def run(*arguments: Any) -> tuple[dict[str, Any], str]:
    """What a command printed ({} when it failed), and its messages."""
    process = start(*arguments)
    out, error = process.communicate(timeout=60)
    assert process.returncode in (0, 1), error
    assert "Traceback" not in error, error
    return (json.loads(out) if process.returncode == 0 else {}), error


def safetensors(path: Path, size: int, seed: int) -> None:
    """A real safetensors file of one tensor of `size` bytes."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    block = hashlib.sha256(str(seed).encode()).digest()
    path.write_bytes(struct.pack("<Q", len(header)) + header + (block * (size // 32 + 1))[:size])


def checkpoint(folder: Path, shards: int = 3, size: int = 3_000_000, seed: int = 0) -> Path:
    """A checkpoint in Hugging Face's layout."""
    folder.mkdir(parents=True)
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, name in enumerate(names):
        safetensors(folder / name, size + i, seed + i)
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".tilert") and path.name != MANIFEST
    }


class Mirror:
    """A web server over a folder that counts, cuts connections, and damages or forgets on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent, self.ranges, self.requests = folder, 0, 0, []
        self.cut_after: int | None = None
        self.cuts = 0
        self.with_range, self.slow_s = True, 0.0
        self.headers: list[dict[str, str]] = []
        self.answers: dict[str, Any] = {}
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.requests.append(path)
        self.headers.append(dict(request.headers))
        if path in self.answers:
            status, headers, body = self.answers[path]
        else:
            file = self.folder / path.lstrip("/")
            status, headers, body = (
                (200, {}, file.read_bytes()) if file.is_file() else (404, {}, b"no such file")
            )
        asked = request.headers.get("Range")
        if asked and self.with_range and status == 200:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
            self.ranges += 1
            headers = {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}
            status, body = 206, body[begin:]
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        for at in range(0, len(body), 100_000):
            piece = body[at : at + 100_000]
            if self.cut_after is not None and at >= self.cut_after:
                self.cuts += 1
                request.connection.close()
                return
            try:
                request.wfile.write(piece)
            except OSError:
                return
            self.sent += len(piece)
            time.sleep(self.slow_s)


@contextmanager
def serving(folder: Path) -> Iterator[Mirror]:
    mirror = Mirror(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            mirror.handle(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    mirror.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A complete folder."""
    folder = checkpoint(tmp_path / "source")
    assert run("seal", folder)[0]["changed"]
    return folder


def test_a_folder_is_copied_once_and_then_left_alone(tmp_path: Path, source: Path) -> None:
    dest = tmp_path / "dest"
    first, _ = run("fetch", dest, source, *QUICK)
    assert first["changed"]
    assert content(dest) == content(source)
    assert not (dest / ".tilert-partial").exists()
    before = {path: path.stat().st_mtime_ns for path in dest.rglob("*") if path.is_file()}
    second, _ = run("fetch", dest, source, *QUICK)
    assert not second["changed"]
    assert second["manifest_sha256"] == first["manifest_sha256"]
    after = {path: path.stat().st_mtime_ns for path in dest.rglob("*") if path.is_file()}
    assert {p for p in after if p.name != ".tilert-lock" and after[p] != before.get(p)} == set()
    assert run("verify", dest)[0]["files"] == 6


def test_a_router_gets_the_tokenizer_alone(tmp_path: Path, source: Path) -> None:
    done, _ = run(
        "fetch", tmp_path / "dest", source, "--include", "tokenizer*", "--include", "*config.json", *QUICK
    )
    assert done["files"] == 2
    assert set(content(tmp_path / "dest")) == {"tokenizer.json", "config.json"}
    assert "no file of the source matches" in run("fetch", tmp_path / "x", source, "--include", "nothing*")[1]


def test_a_cut_connection_goes_on_where_it_was_cut(tmp_path: Path, source: Path) -> None:
    with serving(source) as mirror:
        mirror.cut_after = 1_000_000
        done, error = run("fetch", tmp_path / "dest", mirror.url, *QUICK)
        assert done, error
        assert content(tmp_path / "dest") == content(source)
        assert mirror.cuts >= 6  # each of three files twice
        assert mirror.ranges >= 6
        # What was sent but lost in a buffer is sent again; whole files never are.
        assert mirror.sent < done["bytes"] * 1.5


def test_a_killed_download_is_no_download_and_goes_on_later(tmp_path: Path, source: Path) -> None:
    dest = tmp_path / "dest"
    with serving(source) as mirror:
        mirror.slow_s = 0.02
        process = start("fetch", dest, mirror.url, "--jobs", "1", *QUICK)
        while mirror.sent < 4_000_000:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (dest / MANIFEST).exists()
        assert "is not complete" in run("verify", dest)[1]
        assert "is not complete" in run("serve", dest)[1]
        first, mirror.sent, mirror.slow_s = mirror.sent, 0, 0.0
        done, error = run("fetch", dest, mirror.url, *QUICK)
        assert done, error
        assert mirror.sent < done["bytes"] - first / 2, "it began anew"
    assert content(dest) == content(source)


def test_a_server_without_ranges_is_asked_from_the_beginning(tmp_path: Path, source: Path) -> None:
    dest, name = tmp_path / "dest", "model-00000-of-00003.safetensors"
    part = dest / ".tilert-partial" / name
    part.parent.mkdir(parents=True)
    part.write_bytes((source / name).read_bytes()[:1_234_567])
    with serving(source) as mirror:
        mirror.with_range = False
        assert run("fetch", dest, mirror.url, *QUICK)[0]["changed"]
    assert content(dest) == content(source)


def test_a_part_of_another_revision_is_not_completed_into_a_mixture(tmp_path: Path, source: Path) -> None:
    dest, name = tmp_path / "dest", "model-00000-of-00003.safetensors"
    part = dest / ".tilert-partial" / name
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1_000_000)
    with serving(source) as mirror:
        assert run("fetch", dest, mirror.url, *QUICK)[0]["changed"]
    assert content(dest) == content(source)


def test_damage_on_the_way_is_refused_by_name(tmp_path: Path, source: Path) -> None:
    dest, name = tmp_path / "dest", "model-00001-of-00003.safetensors"
    with serving(source) as mirror:
        body = bytearray((source / name).read_bytes())
        body[2_000_000] ^= 1
        mirror.answers[f"/{name}"] = (200, {}, bytes(body))
        done, error = run("fetch", dest, mirror.url, *QUICK)
        assert not done
        assert name in error
        assert "its hash is" in error
        assert not (dest / MANIFEST).exists()
        assert not (dest / name).exists()


def test_damage_on_the_disk_is_found(tmp_path: Path, source: Path) -> None:
    dest, name = tmp_path / "dest", "model-00001-of-00003.safetensors"
    run("fetch", dest, source, *QUICK)
    body = bytearray((dest / name).read_bytes())
    body[2_000_000] ^= 1
    (dest / name).write_bytes(body)
    assert "is damaged" in run("verify", dest)[1]
    # A file that changed since it was verified is read again, and brought again.
    (dest / MANIFEST).unlink()
    assert run("fetch", dest, source, *QUICK)[0]["changed"]
    assert content(dest) == content(source)


def test_a_new_revision_leaves_nothing_of_the_old_one(tmp_path: Path, source: Path) -> None:
    dest = tmp_path / "dest"
    run("fetch", dest, source, *QUICK)
    (dest / "notes.txt").write_text("the site's own")
    newer = checkpoint(tmp_path / "newer", shards=2, seed=7)
    run("seal", newer)
    assert run("fetch", dest, newer, *QUICK)[0]["changed"]
    assert content(dest) == content(newer) | {"notes.txt": b"the site's own"}


def test_only_the_pinned_source_is_taken(tmp_path: Path, source: Path) -> None:
    pinned = run("seal", source)[0]["manifest_sha256"]
    assert run("fetch", tmp_path / "a", source, "--manifest-sha256", pinned, *QUICK)[0]["changed"]
    error = run("fetch", tmp_path / "b", source, "--manifest-sha256", "0" * 64, *QUICK)[1]
    assert pinned in error
    assert "is pinned" in error
    assert content(tmp_path / "b") == {}


@pytest.mark.parametrize("path", ["../outside", "/etc/cron.d/x", "a/../../b", ".tilert-partial/x", "a\\b"])
def test_no_source_writes_outside_the_folder(tmp_path: Path, source: Path, path: str) -> None:
    listing = json.loads((source / MANIFEST).read_text())
    listing["files"][0]["path"] = path
    with serving(source) as mirror:
        mirror.answers[f"/{MANIFEST}"] = (200, {}, json.dumps(listing).encode())
        done, error = run("fetch", tmp_path / "dest", mirror.url, *QUICK)
    assert not done
    assert "manifest:" in error


def test_a_disk_that_is_too_small_is_told_with_numbers_before_anything_is_fetched(
    tmp_path: Path, source: Path
) -> None:
    with serving(source) as mirror:
        arguments = ["--reserve-bytes", str(10**18)]
        done, error = run("fetch", tmp_path / "dest", mirror.url, *arguments)
        assert not done
        assert "needs 9.000 MB more and 1000000000.0 GB to spare" in error
        assert "GB free of" in error
        assert mirror.requests == [f"/{MANIFEST}"]


def test_two_at_once_fetch_once(tmp_path: Path, source: Path) -> None:
    with serving(source) as mirror:
        mirror.slow_s = 0.01
        both = [start("fetch", tmp_path / "dest", mirror.url, *QUICK) for _ in range(2)]
        found = [json.loads(process.communicate(timeout=60)[0]) for process in both]
        assert sorted(result["changed"] for result in found) == [False, True]
        assert mirror.sent < found[0]["bytes"] * 1.1
    assert content(tmp_path / "dest") == content(source)


def test_who_holds_the_folder_is_named(tmp_path: Path, source: Path) -> None:
    with serving(source) as mirror:
        mirror.slow_s = 0.05
        holder = start("fetch", tmp_path / "dest", mirror.url, *QUICK)
        while mirror.sent < 100_000:
            time.sleep(0.01)
        error = run("fetch", tmp_path / "dest", mirror.url, "--lock-wait-s", "0", *QUICK)[1]
        assert f"is being filled by process {holder.pid} on " in error
        holder.kill()
        holder.communicate()
        mirror.slow_s = 0.0
        # A holder that was killed holds nothing.
        assert run("fetch", tmp_path / "dest", mirror.url, "--lock-wait-s", "0", *QUICK)[0]["changed"]


# --- Hugging Face ---------------------------------------------------------------------------------------------------

REVISION = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(folder: Path) -> Iterator[tuple[Mirror, Mirror]]:
    """A server with Hugging Face's two calls, and the file store that it redirects to, on another address."""
    with serving(folder) as store, serving(folder) as front:
        siblings = []
        for name, body in content(folder).items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(body)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            if name.endswith(".safetensors"):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(body).hexdigest(),
                    "size": len(body),
                    "pointerSize": 134,
                }
                entry["blobId"] = "f" * 40
            siblings.append(entry)
            answer: Any = (200, {}, body)
            if "lfs" in entry:
                answer = (302, {"Location": f"http://localhost:{store.port}/{name}?signature=secret"}, b"")
            front.answers[f"/org/name/resolve/{REVISION}/{name}"] = answer
        listing = json.dumps({"sha": REVISION, "siblings": siblings}).encode()
        front.answers[f"/api/models/org/name/revision/{REVISION}"] = (200, {}, listing)
        yield front, store


def test_a_pinned_revision_comes_from_hugging_face_and_the_token_goes_nowhere_else(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    with hub(source) as (front, store):
        store.cut_after = 1_000_000
        arguments = ["--endpoint", front.url, "--revision", REVISION, "--token-file", tmp_path / "token"]
        done, error = run("fetch", tmp_path / "dest", "hf:org/name", *arguments, *QUICK)
        assert done, error
        assert content(tmp_path / "dest") == content(source)
        assert store.cuts >= 3
        assert all(headers.get("Authorization") == "Bearer hf_secret" for headers in front.headers)
        assert store.headers
        assert not [headers for headers in store.headers if "Authorization" in headers]
        assert "hf_secret" not in error
        assert json.loads((tmp_path / "dest" / MANIFEST).read_text())["revision"] == REVISION
        # A changed small file has only git's hash, and that is checked too.
        front.answers[f"/org/name/resolve/{REVISION}/config.json"] = (200, {}, b'{"seed": 1}')
        done, error = run("fetch", tmp_path / "other", "hf:org/name", *arguments, *QUICK)
        assert not done
        assert "config.json: its hash is" in error


@pytest.mark.parametrize("revision", ["main", "v1.0", "", REVISION[:12]])
def test_a_branch_is_no_revision(tmp_path: Path, revision: str) -> None:
    error = run(
        "fetch", tmp_path / "dest", "hf:org/name", "--revision", revision, "--endpoint", "http://127.0.0.1:9"
    )[1]
    assert "40 hex digits" in error


def test_what_the_source_refuses_is_told_with_its_remedy(tmp_path: Path, source: Path) -> None:
    with hub(source) as (front, _):
        path = f"/api/models/org/name/revision/{REVISION}"
        arguments = ["hf:org/name", "--endpoint", front.url, "--revision", REVISION]
        for status, words in {401: "give a token", 403: "licence", 404: "correct the name"}.items():
            front.answers[path] = (status, {}, b"")
            assert words in run("fetch", tmp_path / "dest", *arguments)[1]
    assert "cannot be reached" in run("fetch", tmp_path / "dest", *arguments)[1]
    assert "absolute folder" in run("fetch", tmp_path / "dest", "relative/folder")[1]
    assert "no such folder" in run("fetch", tmp_path / "dest", "/nonexistent/folder")[1]


# --- by hand, and on to others ----------------------------------------------------------------------------------------


def test_a_folder_filled_by_hand_is_checked_before_it_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "by-hand")
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000])
    assert "it is cut" in run("seal", folder)[1]
    shard.unlink()
    assert f"names 1 files that are not there, such as {shard.name}" in run("seal", folder)[1]
    assert not (folder / MANIFEST).exists()
    shard.write_bytes(whole)
    assert run("seal", folder)[0]["changed"]
    assert not run("seal", folder)[0]["changed"]


def test_a_complete_folder_is_handed_on_and_nothing_else_of_the_host(tmp_path: Path, source: Path) -> None:
    (tmp_path / "secret").write_text("not for others")
    (source / "notes.txt").write_text("not in the manifest")
    server = start("serve", source, "--host", "127.0.0.1")
    try:
        assert server.stderr
        port = server.stderr.readline().split()[-1]
        done, error = run("fetch", tmp_path / "dest", f"http://127.0.0.1:{port}", *QUICK)
        assert done, error
        asking = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--path-as-is", "--noproxy", "*"]
        for path in ("../secret", "notes.txt", "%2e%2e/secret", "/etc/hostname"):
            status = subprocess.run(
                [*asking, f"http://127.0.0.1:{port}/{path}"],
                capture_output=True,
                text=True,
            )
            assert status.stdout == "404", path
    finally:
        server.kill()
        server.communicate()
    assert content(tmp_path / "dest") | {"notes.txt": b"not in the manifest"} == content(source)


# --- converting: a converter with TileRT's command line, since TileRT's takes whole models only -------------------

CONVERTER = """
import json, pathlib, shutil, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
behave, model, save = sys.argv[1], pathlib.Path(options["--model_dir"]), pathlib.Path(options["--save_dir"])
with open(save.parent / "runs", "a") as runs:
    runs.write(options["--model_type"] + "\\n")
assert not list(save.iterdir()), "the folder is not empty"
names = []
for number, shard in enumerate(sorted(model.glob("*.safetensors"))):
    names.append(f"model.safetensors-{number:05d}-of-00003.safetensors")
    shutil.copy(shard, save / names[-1])
    time.sleep(float(behave) if behave[0].isdigit() else 0)
if behave == "fails":
    sys.exit("out of memory")
if behave == "cuts":
    (save / names[-1]).write_bytes((save / names[-1]).read_bytes()[:-10])
if behave == "forgets":
    (save / names[-1]).unlink()
if behave != "ends early":
    (save / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
"""


class Conversion:
    """A complete checkpoint, and the command that converts it."""

    def __init__(self, folder: Path, model: Path) -> None:
        (folder / "share").mkdir()
        (folder / "converter.py").write_text(CONVERTER)
        (folder / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
        self.folder, self.model, self.dest = folder, model, folder / "share/converted"

    def arguments(self, behave: str = "0", *more: Any, version: str = "0.1.5.post3") -> list[Any]:
        return [
            *["convert", self.dest, "--model-dir", self.model, "--model-type", "glm-5"],
            *[
                "--converter-version",
                version,
                "--reserve-bytes",
                "0",
                "--meminfo",
                self.folder / "meminfo",
                *more,
            ],
            *["--converter", sys.executable, self.folder / "converter.py", behave],
        ]

    @property
    def runs(self) -> int:
        runs = self.folder / "share/runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0


@pytest.fixture
def conversion(tmp_path: Path, source: Path) -> Conversion:
    return Conversion(tmp_path, source)


def test_a_conversion_is_done_once_and_again_for_other_weights_or_another_converter(
    tmp_path: Path, conversion: Conversion
) -> None:
    assert run(*conversion.arguments())[0]["changed"]
    assert not run(*conversion.arguments())[0]["changed"]
    assert conversion.runs == 1
    assert run("verify", conversion.dest)[0]["files"] == 6
    assert run(*conversion.arguments(version="0.1.6"))[0]["changed"]
    newer = checkpoint(tmp_path / "newer", seed=5)
    run("fetch", conversion.model, newer, *QUICK)
    assert run(*conversion.arguments(version="0.1.6"))[0]["changed"]
    assert conversion.runs == 3
    assert not list(conversion.dest.parent.glob("*.partial"))
    assert not list(conversion.dest.parent.glob("*.old"))


def test_configuration_and_tokenizer_go_with_the_converted_weights(conversion: Conversion) -> None:
    run(*conversion.arguments())
    made, had = content(conversion.dest), content(conversion.model)
    assert made["config.json"] == had["config.json"]
    assert made["tokenizer.json"] == had["tokenizer.json"]
    assert not [name for name in had if name.endswith(".safetensors") and made.get(name) == had[name]]


def test_two_hosts_convert_into_one_folder_once(conversion: Conversion) -> None:
    both = [start(*conversion.arguments("0.3")) for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in both]
    found = [json.loads(out) for out, _ in ends]
    assert sorted(result["changed"] for result in found) == [False, True]
    assert found[0]["manifest_sha256"] == found[1]["manifest_sha256"]
    assert conversion.runs == 1
    assert any("waiting for process" in error for _, error in ends)


def test_a_conversion_that_is_cut_leaves_nothing_that_looks_done(conversion: Conversion) -> None:
    process = start(*conversion.arguments("20"))
    partial = conversion.dest.with_name("converted.partial")
    while not list(partial.glob("*.safetensors")):
        time.sleep(0.02)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    process.kill()
    process.communicate()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    assert partial.is_dir()
    assert not conversion.dest.exists()
    assert run(*conversion.arguments())[0]["changed"]
    assert run("verify", conversion.dest)[0]["files"] == 6
    assert not partial.exists()


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        ("fails", "ended with 1"),
        ("ends early", "wrote no model.safetensors.index.json"),
        ("cuts", "it is cut"),
        ("forgets", "names 1 files that are not there"),
    ],
)
def test_what_a_converter_leaves_behind_is_checked(conversion: Conversion, behave: str, words: str) -> None:
    done, error = run(*conversion.arguments(behave))
    assert not done
    assert words in error
    assert not conversion.dest.exists()


def test_the_old_weights_stay_until_the_new_ones_are_whole(conversion: Conversion) -> None:
    run(*conversion.arguments())
    before = content(conversion.dest)
    assert not run(*conversion.arguments("fails", version="0.1.6"))[0]
    assert content(conversion.dest) == before
    assert run("verify", conversion.dest)[0]


def test_disk_and_memory_are_asked_first_and_told_with_numbers(conversion: Conversion) -> None:
    (conversion.folder / "meminfo").write_text("MemTotal: 999999 kB\nMemAvailable: 8192 kB\n")
    error = run(*conversion.arguments())[1]
    assert "the conversion needs 9.450 MB of memory, and 8.389 MB are available" in error
    error = run(*conversion.arguments("0", "--disk-factor", "1e12"))[1]
    assert "needs 9000243000.0 GB more" in error
    assert "GB free of" in error
    assert conversion.runs == 0


def test_only_a_complete_checkpoint_is_converted(conversion: Conversion) -> None:
    (conversion.model / MANIFEST).unlink()
    assert "is not complete: fetch it first" in run(*conversion.arguments())[1]
    assert conversion.runs == 0
