"""Settings of a pool's KV cache tiers: host memory, disks, an object store and other workers' host memory."""

from typing import Annotated, Literal

from penstock.kernel.settings import Knob, Settings


class CacheSettings(Settings, frozen=True, kw_only=True):
    """Tiers below each engine's own KV memory; without host memory there are none."""

    host: Annotated[
        int,
        Knob(
            "Host memory of each engine for KV blocks; 0 means no tiers. It is vLLM's own, and the tier process below "
            "it has an eighth as much; with peers the other way round.",
            unit="bytes",
            ge=0,
        ),
    ] = 0
    disk: Annotated[int, Knob("Disk for KV blocks of each engine; 0 is none.", unit="bytes", ge=0)] = 0
    disk_dirs: Annotated[
        tuple[str, ...], Knob("Directories of the disk tier, one per device; blocks are spread over them.")
    ] = ()
    object_url: Annotated[
        str | None,
        Knob(
            "Object store that the model's engines share, such as s3://BUCKET/PREFIX (AWS_ENDPOINT_URL names the "
            "server where it is not Amazon's); unset is none."
        ),
    ] = None
    peers: Annotated[bool, Knob("Fetch blocks from the host memory of the model's other engines.")] = False
    peers_nixl: Annotated[
        bool,
        Knob(
            "Fetch peers' blocks by NIXL (UCX) where both tier processes have it. UCX does not ask who reads: for one "
            "trusted network only."
        ),
    ] = False
    order: Annotated[
        Literal["lru", "priority"],
        Knob("Which block a full tier evicts first; only priority honours pins."),
    ] = "priority"
    offload: Annotated[
        Literal["all", "second_hit"],
        Knob("Which blocks go to the tiers: all, or those that are computed for the second time."),
    ] = "all"
    write: Annotated[
        Literal["through", "back"],
        Knob("When a block goes from host to disk or object store: at once, or when host memory evicts it."),
    ] = "through"
    metrics_port: Annotated[
        int,
        Knob(
            "Port of the metrics of the first engine's tier process, the next engine has the next port; 0 is none.",
            ge=0,
            le=65535,
        ),
    ] = 0
