"""Jobs that engines make, such as videos, images and files: asked for later, at the engine that has them."""
