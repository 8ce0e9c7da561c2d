"""What reaches a cluster? Requests, arrivals, lengths, workloads and trace formats; pure."""
