"""The simulated shell: the server's own decisions under a virtual clock."""
