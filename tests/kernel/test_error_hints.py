"""Hints for errors of the operating system name their cause."""

import errno
import os
import socket
from pathlib import Path

import pytest

from penstock.adapters.listen_address import listen_hint
from penstock.kernel.errors import bind_hint, read_hint, write_hint


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.EADDRINUSE, "another server has it; choose another"),
        (errno.EACCES, "ports below 1024"),
        (errno.EADDRNOTAVAIL, "no such address"),
        (errno.EMFILE, "choose another"),
    ],
)
def test_an_address_that_cannot_be_bound(code: int, cause: str) -> None:
    assert cause in bind_hint(error(code), "choose another")
    assert ("another server" in bind_hint(error(code), "choose another")) == (code == errno.EADDRINUSE)


def test_a_name_that_cannot_be_resolved_is_no_server_that_has_the_port() -> None:
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("no-such-host.invalid", 1)
    assert "can't be resolved" in bind_hint(caught.value, "choose another")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (errno.ENOSPC, "the disk is full: free some of it, or set x"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EACCES, "this user may not write there; set x"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "a file has the name"),
        (errno.EIO, "set x"),
    ],
)
def test_a_file_that_cannot_be_written(code: int, cause: str) -> None:
    assert cause in write_hint(error(code), "set x")


def test_a_real_full_disk() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError) as caught, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")
    assert "the disk is full" in write_hint(caught.value, "set x")


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (error(errno.ENOENT), "make one"),
        (error(errno.EACCES), "this user may not read it"),
        (error(errno.EISDIR), "it is a folder"),
        (ValueError("no YAML"), "it must be YAML"),
    ],
)
def test_a_file_that_cannot_be_read(failure: Exception, cause: str) -> None:
    assert cause in read_hint(failure, "make one", "it must be YAML")


def test_a_port_that_grpc_cannot_bind_names_its_cause() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "another server has it" in listen_hint(f"127.0.0.1:{other.getsockname()[1]}", "choose another")
    assert "can't be resolved" in listen_hint("no-such-host.invalid:9001", "choose another")
    assert "no such address" in listen_hint("192.0.2.1:9001", "choose another")
