"""One outside thing each, behind the Protocols of `seams`; they never import each other."""
