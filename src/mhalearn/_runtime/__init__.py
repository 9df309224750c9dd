"""The ground floor: devices, threads, seeds, validation, files, types, version."""
