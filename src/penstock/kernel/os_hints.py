"""Hints for errors of the operating system: why an address can't be bound, or a file not written, and what to do."""

import errno

_BOUND = {
    errno.EADDRINUSE: "another server has it; {choose}",
    errno.EACCES: "this user may not bind ports below 1024; {choose}",
    errno.EPERM: "this user may not bind it; {choose}",
    errno.EADDRNOTAVAIL: "this machine has no such address; name one of its own, such as 127.0.0.1",
}
_WRITTEN = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full: free some of it, or {choose}"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not write there; {choose}"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file has the name of one of its folders; {choose}"),
    errno.EROFS: "that file system is read-only; {choose}",
}


def bind_hint(error: OSError, choose: str) -> str:
    """Return what to do about an address that can't be bound; ``choose`` says how another is named."""
    code = error.errno or 0
    if code < 0:  # of the resolver, whose codes are negative
        return "the name of the host can't be resolved; name an address of this machine, such as 127.0.0.1"
    return _BOUND.get(code, "{choose}").format(choose=choose)


def write_hint(error: OSError, choose: str) -> str:
    """Return what to do about a file or folder that can't be written; ``choose`` says how another is named."""
    return _WRITTEN.get(error.errno or 0, "{choose}").format(choose=choose)
