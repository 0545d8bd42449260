"""One rank as a process: main thread (control, signals, heartbeats), compute thread (bring-up and steps)."""
