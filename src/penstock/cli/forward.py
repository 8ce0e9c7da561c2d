"""Command ``penstock forward``: forwards events among frontends that do not reach each other directly."""

import signal
from collections.abc import Iterable

import click

from penstock.cli.shared.settings_flags import SettingsCommand, load_to_start, settings_options

EPILOG = """\b
Examples:
  penstock forward cluster.yaml
  penstock forward --discovery.forwarder tcp://10.0.0.5:5557,tcp://10.0.0.5:5558

The frontends of a cluster with discovery.plane forwarder connect to it. It needs the cluster's secret, by
PENSTOCK_CLUSTER_SECRET or cluster_secret_file; without one it speaks plain. While it is away each router decides by
what it knows itself.
"""


@click.command(
    "forward", cls=SettingsCommand, epilog=EPILOG, short_help="Carry events among the frontends of a cluster."
)
@click.argument("config", required=False, metavar="[CONFIG]")
@settings_options
def command(config: str | None, overrides: tuple[str, ...]) -> int:
    """Forward what each frontend publishes to all the others, until Ctrl-C."""
    from penstock.adapters.planes.zmq_forwarder import Forwarder
    from penstock.config.cluster_secret_file import secret_text
    from penstock.kernel.secret import ClusterSecret

    settings = load_to_start(config, overrides).settings
    given = settings.cluster_secret is not None or settings.cluster_secret_file is not None
    secret = ClusterSecret(secret_text(settings)) if given else None
    forwarder = Forwarder(*settings.discovery.forwarder, secret=secret).start()
    spoken = "with the cluster's secret" if given else "plain: any process that reaches it can publish and subscribe"
    click.echo(f"Forwarding {forwarder.publish_endpoint} to {forwarder.subscribe_endpoint}, {spoken}. Ctrl-C stops.")
    _wait_for_signal((signal.SIGINT, signal.SIGTERM))
    forwarder.close()
    return 0


def _wait_for_signal(signals: Iterable[signal.Signals]) -> None:
    """Return when one of these signals comes."""
    for number in signals:
        signal.signal(number, lambda *_: None)  # a handler of ours, or the wait below would never return
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.sigwait(signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
