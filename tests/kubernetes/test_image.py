"""The image of the Dockerfile, built on a base of Debian packages and started: nothing is pulled from a registry."""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.adapters.listen_address import free_port
from tests.conftest import skip_or_fail
from tests.kubernetes.programs import program
from tests.release.release_script import script

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MEMORY, STORAGE_BYTES = Path("/dev/shm"), 4 << 30
BASE, IMAGE = "localhost/penstock-test-base", "localhost/penstock-test"
CHROOT = ("--isolation", "chroot", "--network", "host")
"""Without namespaces and without a bridge: what a build machine has least."""
PACKAGES = "--include=base-files,dash,coreutils,python3,python3-venv,ca-certificates,libstdc++6,openssl"
TRUST = "mkdir -p /etc/ssl/certs && cat /usr/share/ca-certificates/mozilla/*.crt >/etc/ssl/certs/ca-certificates.crt"
"""What ca-certificates does when it is configured."""


class Buildah:
    """buildah with a storage of its own, which goes with the test."""

    def __init__(self, path: Path, folder: Path, driver: str) -> None:
        self.words = [str(path), "--root", str(folder / "root"), "--runroot", str(folder / "run")]
        self.words += ["--storage-driver", driver]

    def run(self, *words: str, timeout: float = 600.0) -> str:
        answer = subprocess.run([*self.words, *words], capture_output=True, text=True, timeout=timeout)
        assert answer.returncode == 0, f"{words}: {answer.stdout[-3000:]}{answer.stderr[-3000:]}"
        return answer.stdout.strip()

    def start(self, *words: str, log: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*self.words, *words], stdout=log.open("wb"), stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for images: in memory where that is large enough, because a disk takes minutes for them."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > STORAGE_BYTES:
        with tempfile.TemporaryDirectory(prefix="penstock-image-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    path = tmp_path_factory.mktemp("buildah")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def buildah(storage: Path) -> Buildah:
    """buildah, where it is at hand and allowed to run."""
    path = program("buildah")
    reasons = []
    for driver in ("overlay", "vfs"):  # vfs copies everything for each step, and runs wherever there is a disk
        tool = Buildah(path, storage / driver, driver)
        try:
            tool.run("rm", tool.run("from", "scratch", timeout=60))
        except AssertionError as error:
            reasons.append(str(error))
        else:
            return tool
    skip_or_fail("buildah", f"it may not run here: {reasons}")
    raise AssertionError("it was skipped")


@pytest.fixture(scope="module")
def image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image, on Debian's own Python."""
    mmdebstrap = program("mmdebstrap")
    folder = tmp_path_factory.mktemp("image")
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    mirror, codename = next(line.split() for line in targets if "security" not in line)
    # Only unpacked: to configure packages that are not looked at takes minutes.
    words = [str(mmdebstrap), "--variant=extract", PACKAGES, codename, str(folder / "debian.tar"), mirror]
    built = subprocess.run(words, capture_output=True, text=True)
    if built.returncode:
        skip_or_fail("mmdebstrap", f"it can't make a base: {built.stdout[-300:]}{built.stderr[-300:]}")
    container = buildah.run("from", "scratch")
    buildah.run("add", container, str(folder / "debian.tar"), "/")
    buildah.run("run", *CHROOT, container, "--", "sh", "-c", TRUST)
    buildah.run("commit", "--rm", container, BASE)
    (folder / "debian.tar").unlink()
    volumes = [word for place in pip_places(folder / "pip.conf") for word in ("--volume", f"{place}:{place}:ro")]
    volumes += ["--volume", f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]
    buildah.run("build", *CHROOT, *volumes, "--build-arg", f"BASE={BASE}", "--tag", IMAGE, str(ROOT))
    return IMAGE


def pip_places(config: Path) -> list[Path]:
    """Write a pip.conf as this machine's pip is set, and return the files and folders that it names."""
    lines = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = dict(line.split("=", 1) for line in lines.splitlines())
    # Of the environment what is given there counts more.
    ordered = sorted(settings.items(), key=lambda item: item[0].startswith(":env:"))
    values = {name.rpartition(".")[2]: value.strip("'\"").replace("\\n", " ") for name, value in ordered}
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    words = [word for value in values.values() for word in value.split()]
    places = [Path(urlsplit(word).path) for word in words if word.startswith(("/", "file://"))]
    # The pages of an index refer to the files beside them.
    whole = {place.parent if place.name == "simple" else place for place in places if place.exists()}
    return sorted(whole)


def test_the_image_has_the_wheel_and_no_sources_and_runs_without_root(buildah: Buildah, image: str) -> None:
    made = json.loads(buildah.run("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert (made["User"], made["Entrypoint"]) == ("65532:65532", ["penstock"])
    container = buildah.run("from", image)
    run = ("run", *CHROOT, container, "--")
    assert "penstock" in buildah.run(*run, "penstock", "--version")
    look = "import os, penstock, lightkube, grpc, hpack; print(os.getuid(), os.path.exists('/src'), penstock.__file__)"
    words = buildah.run(*run, "python", "-c", look).split()
    assert words[:2] == ["65532", "False"]
    assert words[2].startswith("/opt/penstock/lib/")
    buildah.run("rm", container)


def test_a_release_has_it_as_one_file_with_its_bill_of_materials(
    buildah: Buildah, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    script().archive(buildah.words, image, "9.9.9", tmp_path)
    assert (tmp_path / "penstock-9.9.9-image.tar").stat().st_size > 20 << 20
    bill = json.loads((tmp_path / "penstock-9.9.9-image.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", "9.9.9")
    listed = {each["purl"].partition("@")[0]: each["version"] for each in bill["components"]}
    assert {"pkg:pypi/penstock", "pkg:pypi/aiohttp", "pkg:pypi/lightkube", "pkg:generic/python"} <= listed.keys()
    assert all(listed.values()), listed


def test_a_simulated_cluster_starts_in_it_and_answers(buildah: Buildah, image: str, tmp_path: Path) -> None:
    container = buildah.run("from", "--volume", f"{tmp_path}:/run/penstock", image)
    tmp_path.chmod(0o777)  # the image's user is another
    port = free_port()
    environment = [word for name in ("HOME", "PENSTOCK_STATE_DIR") for word in ("--env", f"{name}=/run/penstock")]
    up = ("penstock", "up", "--set", f"frontend.port={port}", "--set", "runs.dir=/run/penstock/runs")
    cluster = buildah.start("run", *CHROOT, *environment, container, "--", *up, log=tmp_path / "log")
    try:
        body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        for _ in range(120):
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=10))
                break
            except OSError:
                assert cluster.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.5)
        else:
            raise AssertionError((tmp_path / "log").read_text())
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        cluster.terminate()
        cluster.wait(60)
        buildah.run("rm", container)
