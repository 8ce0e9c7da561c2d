"""Process of a container: enters its pod's network, gets a file system and process ids of its own, and runs a command.

usage: python -I -S container_process.py SPEC

SPEC is a JSON file with ``command``, ``env``, ``folder`` (the working directory), ``network`` (path of the pod's
namespace), ``hostname``, ``root`` (a folder for what the container writes), ``mounts`` (source, target, read-only),
``programs`` (folders of this machine that no mount may hide: in a checkout below /tmp a volume there would),
``read_only``, ``parent`` and ``pid_file``. It runs by path and imports nothing of ours, so that it starts at once. It
exits as the command does: 128 + signal where one ended it. The kernel kills it, and the command with all its children,
when the parent dies.
"""

import ctypes
import json
import os
import signal
import socket
import sys

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
OWN = ("/proc", "/dev", "/sys")
"""Folders that are mounted as this machine has them, and what is mounted below them with them."""

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() for word in (source, target, kind)]
    checked(libc.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount of {source} at {target}")


def make_root(spec: dict) -> str:  # type: ignore[type-arg]
    """Mount this machine's files with a layer for the container's writes over them, and its volumes in there."""
    layers = {name: os.path.join(spec["root"], name) for name in ("written", "work", "merged")}  # noqa: PTH118
    for folder in layers.values():
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    root = layers["merged"]
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    with open("/proc/self/mountinfo") as file:  # noqa: PTH123
        others = [line.split()[4] for line in file]
    mount("overlay", root, "overlay", options=f"lowerdir=/,upperdir={layers['written']},workdir={layers['work']}")
    for other in (*OWN[1:], *(each for each in others if each != "/" and not each.startswith(OWN))):
        if os.path.isdir(other):  # noqa: PTH112
            mount(other, root + other, flags=MS_BIND | MS_REC)
    for source, target, read_only in spec["mounts"]:
        inside = place_in(root, target)
        if os.path.isdir(source):  # noqa: PTH112
            os.makedirs(inside, exist_ok=True)  # noqa: PTH103
        else:
            os.makedirs(os.path.dirname(inside), exist_ok=True)  # noqa: PTH103, PTH120
            os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
        mount(source, inside, flags=MS_BIND)
        if read_only:
            mount("none", inside, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
    for program in spec["programs"]:
        if any(program.startswith(f"{target.rstrip('/')}/") for _, target, _ in spec["mounts"]):
            inside = place_in(root, program)
            os.makedirs(inside, exist_ok=True)  # noqa: PTH103
            mount(program, inside, flags=MS_BIND)
    os.makedirs(place_in(root, spec["folder"]), exist_ok=True)  # noqa: PTH103
    if spec["read_only"]:
        mount("none", root, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
    return root


def place_in(root: str, path: str) -> str:
    """Return where a path of the container lies; links in it lead to places below the container's root, too."""
    here = ""
    parts = path.split("/")[::-1]
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = here.rpartition("/")[0]
        elif os.path.islink(f"{root}{here}/{part}"):  # noqa: PTH114
            link = os.readlink(f"{root}{here}/{part}")  # noqa: PTH115
            here = "" if link.startswith("/") else here
            parts += link.split("/")[::-1]
        else:
            here = f"{here}/{part}"
    return root + here


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_command(spec: dict, root: str, alive: int) -> None:  # type: ignore[type-arg]
    """Become the command, as the first process of its own process ids."""
    try:
        die_with_parent()
        os.set_blocking(alive, False)
        try:
            os.read(alive, 1)
            os._exit(137)  # the end of the pipe: the parent died before this process asked for the signal
        except BlockingIOError:
            pass
        os.setsid()
        mount("proc", root + "/proc", "proc")
        os.chroot(root)
        os.chdir(spec["folder"])
        for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["command"][0], spec["command"], spec["env"])
    except OSError as error:
        os.write(2, f"exec of {spec['command'][0]} failed: {error}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def main(path: str) -> int:
    with open(path) as file:  # noqa: PTH123
        spec = json.load(file)
    die_with_parent()
    if os.getppid() != spec["parent"]:
        return 137
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # signals go to the command itself
    network = os.open(spec["network"], os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(network, NEWNET), "entering the pod's network")
    checked(libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID), "namespaces of the container")
    socket.sethostname(spec["hostname"])
    root = make_root(spec)
    alive, _held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(_held)
        run_command(spec, root, alive)
    with open(spec["pid_file"], "w") as file:  # noqa: PTH123
        file.write(str(pid))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except OSError as error:
        sys.stderr.write(f"the container can't be started: {error}\n")
        sys.exit(128)
