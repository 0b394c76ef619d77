"""Speed, measured so to be believed: rows beside peers (`perf.run`), host time, cold starts; records and tables."""
