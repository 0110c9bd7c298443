"""The rendezvous: `state` decides, `server` serves it over TCP, `client` is a learner's connection to it."""
