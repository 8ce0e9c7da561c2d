"""Trace formats: reads traces of services, load generators and spans, by classes and by tables, and writes traces."""
