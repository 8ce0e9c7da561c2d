"""Knobs of the planner's plugins: those in its process, those in other processes, and which may register."""

from typing import Annotated, Literal

from penstock.kernel.settings import Knob, Settings

StageName = Literal["predict", "propose", "reconcile", "constrain"]
HoldName = Literal["accept_when_idle", "hold_last"]

PLUGINS_MAX = 64
"""Most plugins of other processes at a time: who registers ever new ids must not fill the planner's memory."""
MESSAGE_MAX = 10 << 20
"""Bytes of a message from or to a plugin; longer ones count as failures. Dynamo's default."""


class PluginEntry(Settings, frozen=True, kw_only=True):
    """One plugin: a module that is loaded into the planner's process, or an endpoint that is called."""

    module: Annotated[
        str | None, Knob("Python module of a plugin in the planner's process, as import takes it; unset has endpoint.")
    ] = None
    name: Annotated[str, Knob("Class or function in that module; called with options, it gives the plugin.")] = "Plugin"
    options: Annotated[
        dict[str, str], Knob("Named arguments of that call; each text is read as YAML, so 3 is a number.")
    ] = {}
    endpoint: Annotated[
        str | None,
        Knob(
            "Where a plugin serves that does not register: unix:///PATH, grpc://HOST:PORT, or grpcs://HOST:PORT; unset "
            "has module."
        ),
    ] = None
    stage: Annotated[
        StageName,
        Knob("When it is asked: for a forecast, for replicas, to settle what was proposed, or to bound it."),
    ] = "constrain"
    priority: Annotated[int, Knob("Smaller is stronger; the built-in ones have 10 to 30.", unit="count", ge=0)] = 100
    interval: Annotated[float, Knob("Seconds between two calls; 0 is every tick.", unit="s", ge=0)] = 0.0
    hold: Annotated[
        HoldName, Knob("Between two calls: accept_when_idle leaves the plug-in out, hold_last keeps its last targets.")
    ] = "accept_when_idle"
    needs: Annotated[
        tuple[str, ...],
        Knob("What it reads of what was seen: pools, traffic, engines. One that runs elsewhere is sent only that."),
    ] = ()
    requires: Annotated[
        tuple[str, ...], Knob("Without these of an earlier stage a tick passes it over: predictions.")
    ] = ()
    window: Annotated[
        float, Knob("Seconds of traffic that it is shown; 0 is since the tick before.", unit="s", ge=0)
    ] = 0.0


class PluginSettings(Settings, frozen=True, kw_only=True):
    """Steps of the planner that others wrote."""

    deadline: Annotated[float, Knob("Longest that one may take to answer.", unit="s", gt=0)] = 5.0
    heartbeat: Annotated[
        float, Knob("One that gave no sign of life for so long is put out.", unit="s", gt=0, live=True)
    ] = 30.0
    use: Annotated[
        dict[str, PluginEntry], Knob("Plugins that the planner begins with, by id: each has a module or an endpoint.")
    ] = {}
    listen: Annotated[
        str | None,
        Knob(
            "Where plugins register: unix:///PATH, or HOST:PORT; unset is nowhere. Anything but a socket file or "
            "loopback needs cert and key."
        ),
    ] = None
    tokens: Annotated[
        dict[str, str],
        Knob(
            "Plugin id to the secret that it shows, and is shown; without one here or in tokens_file it is refused.",
            secret=True,
        ),
    ] = {}
    tokens_file: Annotated[
        str | None, Knob("File with more of them, a line each, ID TOKEN; only its owner may read it.")
    ] = None
    insecure: Annotated[
        bool,
        Knob("Take plugins without a token, and on addresses without TLS: any process can then scale the cluster."),
    ] = False
    cert: Annotated[str | None, Knob("File of our certificate; turns TLS on where we listen.")] = None
    key: Annotated[str | None, Knob("File of that certificate's key.")] = None
    ca: Annotated[
        str | None, Knob("File of the certificates that sign plugins'; with cert, who registers must have one as well.")
    ] = None

    @property
    def outside(self) -> bool:
        """Whether any plugin may run elsewhere, so that gRPC is needed."""
        return self.listen is not None or any(entry.endpoint for entry in self.use.values())
