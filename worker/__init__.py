"""rankd: the execution layer of an LLM engine, one process per device, driven over the wire of `workerproto`."""
