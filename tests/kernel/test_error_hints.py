"""Hints for errors of the operating system name their cause."""

import errno
import os
import socket
from pathlib import Path

import pytest

from penstock.kernel.errors import bind_hint, write_hint


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
