"""Image spec: the workload ``images`` as one line of text, such as ``count=2,side=1024,repeats=0.5``."""

from typing import Annotated

import msgspec

from penstock.kernel.settings import Knob
from penstock_lab.traffic.lengths import Fixed
from penstock_lab.traffic.workloads import Images


class ImageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Images of a request, and how often one comes again."""

    count: Annotated[int, Knob("Images of each request.", unit="count", ge=1, le=64)] = 1
    side: Annotated[int, Knob("Pixels of both sides of each; 0 is a mixture of usual sizes.", ge=0, le=8192)] = 0
    repeats: Annotated[float, Knob("Share of the images that are popular ones.", unit="ratio", ge=0, le=1)] = 0.3
    popular: Annotated[int, Knob("Popular images, the n-th asked for 1/n as often.", unit="count", ge=1)] = 200

    def shape(self) -> Images:
        """Return the workload's make-up."""
        sides = (Fixed(self.side), Fixed(self.side)) if self.side else Images().sides
        return Images(count=Fixed(self.count), sides=sides, repeats=self.repeats, popular=self.popular)


IMAGE_KINDS = {"images": ImageSpec}
