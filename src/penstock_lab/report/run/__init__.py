"""Report on one run folder: reads its files, sums them up, and draws report.html."""
