"""A certificate of localhost, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

from tests.conftest import skip_or_fail


def make_certificate(folder: Path, names: str = "DNS:localhost") -> tuple[str, str]:
    """Return the files of a self-signed certificate and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        skip_or_fail("openssl", "there is no such command to make a certificate with")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    asked = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = [openssl, *asked.split(), "-addext", f"subjectAltName={names}", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
