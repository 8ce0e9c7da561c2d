"""TCP mover: reads and writes regions of another host's memory, between holders of the cluster's secret."""
