"""Which processes take part: the membership, the rendezvous that decides it, and the environment a process starts in."""
