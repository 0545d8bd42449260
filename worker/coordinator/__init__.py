"""The coordinator: starts or adopts the ranks, relays steps, watches, answers workerctl. No torch."""
