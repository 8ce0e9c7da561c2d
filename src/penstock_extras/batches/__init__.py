"""Files and batches: many requests in one file, answered in the cluster's idle time."""
