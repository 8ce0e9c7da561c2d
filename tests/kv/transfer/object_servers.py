"""Real object stores on loopback: moto's S3 server, and Azurite, which is Azure Blob."""

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from penstock.adapters.listen_address import free_port
from tests.conftest import skip_or_fail

BUCKET = "blocks"
PATIENCE = 30.0
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's public account for tests."""


@contextmanager
def server(command: list[str], port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until it listens, and end it afterwards."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < limit, f"{command[0]} does not listen"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """Serve S3 with an empty bucket; yields the client's options and the server's process id."""
    if find_spec("moto") is None or find_spec("flask") is None:
        skip_or_fail("s3", "moto's server is not installed")
    port = free_port()
    with server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port, folder) as process:
        endpoint = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=PATIENCE)
        options = {"access_key_id": "anybody", "secret_access_key": "anything", "region": "us-east-1"}
        yield {"endpoint": endpoint, **options}, process.pid


@contextmanager
def azure_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve Azure Blob with an empty container; yields the client's options."""
    command = os.environ.get("PENSTOCK_AZURITE") or shutil.which("azurite-blob")
    if command is None:
        skip_or_fail("azurite", "no azurite-blob on the path (npm install azurite), and PENSTOCK_AZURITE names none")
    port = free_port()
    arguments = ["--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    with server([str(command), *arguments], port, folder):
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        make_container(endpoint)
        yield {"endpoint": endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}


def make_container(endpoint: str) -> None:
    """Make an Azure container, with a request signed by the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items()) + resource
    code = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(code).decode()}"
    address = urlsplit(endpoint)
    connection = http.client.HTTPConnection(address.netloc, timeout=PATIENCE)
    connection.request("PUT", f"{address.path}/{BUCKET}?restype=container", headers=headers)
    assert connection.getresponse().status == 201
    connection.close()
