"""A profile of simulated engines of several sizes, measured on virtual time and written as the command writes it."""

from pathlib import Path

from penstock.config.files.profile_manifest import ProfileManifest
from penstock.kernel.values import RequestShape, Slo
from penstock_lab.profiler.measurement.profile_run import MeasuredPoints, ProfileOptions, finished
from penstock_lab.profiler.measurement.profile_writer import write_profile
from penstock_lab.profiler.measurement.sweep import Sweep, SweepOptions
from tests.lab.profiler.measurement.virtual_probe import MODEL, VirtualProbe, h100

SHAPE = RequestShape(3000.0, 150.0)


class Endless:
    def over(self) -> bool:
        return False


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


async def swept(
    folder: Path, *sizes: int, slo: Slo = Slo(ttft=0.5, itl=0.02), noise: float = 0.0, gap: float = 0.0
) -> ProfileManifest:
    """Measure sizes into a folder, and return the manifest."""
    folder = made(folder)
    options = ProfileOptions(sweep=SweepOptions(shape=SHAPE, longest=8_000), out=folder, slo=slo)
    points, limits, left = MeasuredPoints(folder), {}, list[str]()
    subject = ProfileManifest(model=MODEL, engine="sim", shape=SHAPE, slo=slo)
    points.open(subject)
    for tp in sizes:
        probe = VirtualProbe(h100(tp, max_num_seqs=64), noise=noise, gap=gap)
        limits[tp] = probe.limits
        sweep = Sweep(probe, tp, options.sweep, points.done, Endless(), record=points.add)
        await sweep.run()
        left += sweep.left_out
    manifest = finished(subject, options, points, limits, left)
    write_profile(folder, manifest, list(points.done.values()))
    return manifest
