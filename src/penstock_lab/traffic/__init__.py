"""Traffic that reaches a cluster: requests, arrivals, lengths, workloads and trace formats; pure."""
