"""workerctl: start, look at and end a gang. Answers fast: every import here is one that its subcommand needs."""
