"""Shim: a tiny parent of one engine process that outlives the supervisor for a while, so that another can adopt it.

usage: python -I -S shim.py LEASE GRACE END LOG SAYS COMMAND...

It runs by path and imports nothing of ours, so that it is small and starts at once. A process with a connection to its
socket holds the engine; the kernel closes that connection however the holder dies. Without a holder for GRACE seconds
it ends the engine: SIGTERM, then SIGKILL to the whole process group after END seconds. LEASE is the name of the socket,
which is in no folder, so nothing is left of it. SAYS is 1 where the engine's first line on standard output is JSON that
a holder waits for.

One JSON object per line. To a holder: ``{"pid", "shim", "said", "ended"}``, first on connecting and then whenever
one of the last two is known. From a holder: ``{"stop": seconds}``.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINE_MAX = 65_536
FIRST = 10.0
"""Seconds that it waits at least for its first holder, also to report that the engine ended at once."""
SWEEP = 5.0
"""Seconds that it waits for the engine's remaining processes to die of SIGKILL."""


class Shim:
    def __init__(self, lease: str, grace: float, end: float, log: str, says: bool, command: list[str]) -> None:
        self.grace, self.end, self.command = grace, end, command
        self.first_line: object = None
        self.ended: int | None = None
        self.stopping = False
        self.kill_at: float | None = None
        self.alone_since: float | None = time.monotonic()
        self.greeted = False
        self.holders: dict[socket.socket, bytes] = {}
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + lease)
        self.listener.listen(4)
        self.woken, wake = socket.socketpair()
        self.woken.setblocking(False)
        wake.setblocking(False)
        self.wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.signals: list[int] = []
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # the shim inherits the engine's orphans, and ends them
        self.output_pipe: int | None = None
        self.line = b""
        self.pid = self.start(libc, says)

    def start(self, libc: ctypes.CDLL, says: bool) -> int:
        """Start the engine in a session of its own; the kernel signals it to end when this process dies."""
        write = None
        if says:
            self.output_pipe, write = os.pipe()
        me = os.getpid()
        pid = os.fork()
        if pid:
            if write is not None:
                os.close(write)
            return pid
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == me:  # else the parent died before this process asked for the signal
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(self.log if write is None else write, 1)
                os.dup2(self.log, 2)
                os.execvp(self.command[0], self.command)
        except OSError as error:
            os.write(self.log, f"{self.command[0]} can't be run: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def run(self) -> int:
        """Hold the engine until it ends; return its exit status (128 + signal where one ended it)."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            if self.output_pipe is not None:
                selector.register(self.output_pipe, selectors.EVENT_READ)
            while not self.over():
                for key, _ in selector.select(self.patience()):
                    if key.fileobj is self.listener:
                        self.greet(selector)
                    elif key.fileobj is self.woken:
                        self.woken.recv(4096)
                    elif key.fileobj == self.output_pipe:
                        self.hear(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self.obey(selector, key.fileobj)
                self.reap()
                self.look()
            self.sweep()
            if self.output_pipe is not None:
                os.set_blocking(self.output_pipe, False)
                self.hear(selector)  # its last output
        self.tell()
        assert self.ended is not None
        return self.ended if self.ended >= 0 else 128 - self.ended

    def over(self) -> bool:
        if self.ended is None:
            return False
        return self.greeted or self.alone_since is None or time.monotonic() - self.alone_since > FIRST

    def patient_for(self) -> float:
        """Return how many seconds the shim goes on without a holder."""
        return self.grace if self.greeted else max(self.grace, FIRST)

    def patience(self) -> float | None:
        """Return how long the shim may sleep when no event arrives."""
        now = time.monotonic()
        ends = []
        if self.alone_since is not None and (not self.stopping or self.ended is not None):
            ends.append(self.alone_since + (self.patient_for() if self.ended is None else FIRST))
        if self.kill_at is not None:
            ends.append(self.kill_at)
        return max(0.0, min(ends) - now) + 0.001 if ends else None

    def look(self) -> None:
        """Act on elapsed time and on signals."""
        now = time.monotonic()
        stop_signals = [number for number in self.signals if number != signal.SIGCHLD]
        self.signals.clear()
        if self.ended is not None:
            return
        deserted = self.alone_since is not None and now - self.alone_since >= self.patient_for()
        if stop_signals or (deserted and not self.stopping):
            self.stop(self.end)
        if self.kill_at is not None and now >= self.kill_at:
            self.signal_group(signal.SIGKILL)
            self.kill_at = None

    def stop(self, grace: float) -> None:
        """Signal the engine to end, once; kill it after ``grace`` seconds, or sooner where an earlier call said so."""
        if self.ended is not None:
            return
        at = time.monotonic() + grace
        if not self.stopping:
            os.kill(self.pid, signal.SIGTERM)
            self.kill_at = at
        elif self.kill_at is not None:
            self.kill_at = min(self.kill_at, at)
        self.stopping = True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.pid:
                self.ended = os.waitstatus_to_exitcode(status)
                if self.alone_since is not None:
                    self.alone_since = time.monotonic()

    def sweep(self) -> None:
        """End all processes that the engine left behind."""
        self.signal_group(signal.SIGKILL)
        end = time.monotonic() + SWEEP
        while time.monotonic() < end:
            try:
                with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  # no pathlib here
                    left = [int(pid) for pid in file.read().split()]
            except OSError:
                left = []
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.01)
            except ChildProcessError:
                return

    def signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    # --- holders ----------------------------------------------------------------------------------------------------

    def greet(self, selector: selectors.BaseSelector) -> None:
        holder, _ = self.listener.accept()
        credentials = holder.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] not in (os.getuid(), 0):
            holder.close()
            return
        holder.settimeout(1.0)
        self.holders[holder] = b""
        self.greeted = True
        self.alone_since = None
        selector.register(holder, selectors.EVENT_READ)
        self.tell([holder])

    def obey(self, selector: selectors.BaseSelector, holder: socket.socket) -> None:
        try:
            data = holder.recv(4096)
        except OSError:
            data = b""
        if not data:
            selector.unregister(holder)
            del self.holders[holder]
            holder.close()
            if not self.holders:
                self.alone_since = time.monotonic()
            return
        *lines, self.holders[holder] = (self.holders[holder] + data).split(b"\n")
        for line in lines:
            try:
                self.stop(float(json.loads(line)["stop"]))
            except (ValueError, TypeError, KeyError):
                os.write(self.log, b"the shim was told something that it does not understand\n")

    def hear(self, selector: selectors.BaseSelector) -> None:
        """Read the engine's output: its first line goes to the holders, all of it to the log."""
        assert self.output_pipe is not None
        try:
            data = os.read(self.output_pipe, 65_536)
        except BlockingIOError:
            return
        if not data:
            selector.unregister(self.output_pipe)
            os.close(self.output_pipe)
            self.output_pipe = None
            return
        try:
            os.write(self.log, data)
        except OSError:
            pass  # a full disk must not block the engine's output
        if self.first_line is not None:
            return
        self.line += data
        first, newline, _ = self.line.partition(b"\n")
        if newline or len(self.line) > LINE_MAX:
            try:
                self.first_line = json.loads(first)
            except ValueError:
                self.first_line = first[:200].decode("utf-8", "replace")
            self.line = b""
            self.tell()

    def tell(self, holders: "list[socket.socket] | None" = None) -> None:
        status = {"pid": self.pid, "shim": os.getpid(), "said": self.first_line, "ended": self.ended}
        line = json.dumps(status).encode() + b"\n"
        for holder in list(self.holders) if holders is None else holders:
            try:
                holder.sendall(line)
            except OSError:
                pass  # the holder is leaving; the end of its connection reports that


def main(words: list[str]) -> int:
    lease, grace, end, log, says, *command = words
    return Shim(lease, float(grace), float(end), log, says == "1", command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
