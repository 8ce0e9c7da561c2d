"""Gateway folder: the sockets at which nginx or HAProxy ask and report, and the file that names them the workers."""

import os
import socket
from pathlib import Path

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError

PATH_MAX = 107
"""Most bytes of a Unix socket's path."""
_LONGEST_NAME = len("/reports-frontend-99-4194304.sock")


class GatewayFolder:
    """The folder that ``picker.folder`` names, or one for the frontend's port; the same at every start."""

    def __init__(self, settings: ClusterSettings) -> None:
        folder = settings.picker.folder
        self.path = Path(folder or Path(settings.runs.dir) / f"picker-{settings.frontend.port}").absolute()

    def make(self) -> None:
        """Make the folder where it is missing.

        Raises:
            ConfigError: it can't be made, or its path is too long for a socket.
        """
        if len(os.fsencode(self.path)) + _LONGEST_NAME > PATH_MAX:
            raise ConfigError(
                f"picker.folder {self.path} is too long for the path of a socket",
                hint=f"at most {PATH_MAX - _LONGEST_NAME} bytes, such as /run/penstock",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"picker.folder {self.path} can't be made: {error.strerror}") from error

    def questions(self, index: int) -> Path:
        """Return the socket at which frontend process ``index`` is asked."""
        return self.path / f"ask-{index}.sock"

    def reports(self, of: int | str) -> Path:
        """Return the socket for reports to a frontend process: whichever has that index, or the one of that name."""
        return self.path / f"reports-{of}.sock"

    def bind(self, path: Path, kind: socket.SocketKind) -> socket.socket:
        """Bind a socket in place of one that an earlier process left; whoever may enter the folder may use it.

        Raises:
            ConfigError: it can't be bound.
        """
        bound = socket.socket(socket.AF_UNIX, kind)
        bound.setblocking(False)
        fresh = path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            bound.bind(os.fspath(fresh))
            fresh.chmod(0o666)
            fresh.replace(path)  # so that there is one at every moment
        except OSError as error:
            bound.close()
            raise ConfigError(f"the socket {path} can't be made: {error.strerror or error}") from error
        return bound

    def write(self, name: str, text: str) -> bool:
        """Write a file where its text is another one than before; return whether it was."""
        path = self.path / name
        if path.is_file() and path.read_text() == text:
            return False
        fresh = self.path / f".{name}.{os.getpid()}"
        fresh.write_text(text)
        fresh.replace(path)
        return True
