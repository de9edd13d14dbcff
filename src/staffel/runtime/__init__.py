"""The live shell: processes, links and clocks around the state machines of `control`."""
