"""Plug-ins that an engine's own process loads through its public entry points, inert unless switched on.

Standard library, msgspec, pyzmq and `penstock.kernel` only, so that it can be installed beside any engine. A fault in
here is logged once and switches the plug-in off; it never reaches the engine.
"""
