"""C for the CPU hot paths, called through `library`."""
